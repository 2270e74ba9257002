"""The module that models call, its options and their types, where `mlstm_kernels.torch.backend_module` has them."""

from tfla.integrations.mlstm_kernels.backend import (
    BackendModeType,
    ChunkwiseKernelType,
    DtypeType,
    SequenceKernelType,
    StepKernelType,
    mLSTMBackend,
    mLSTMBackendConfig,
)

__all__ = [
    "BackendModeType",
    "ChunkwiseKernelType",
    "DtypeType",
    "SequenceKernelType",
    "StepKernelType",
    "mLSTMBackend",
    "mLSTMBackendConfig",
]
