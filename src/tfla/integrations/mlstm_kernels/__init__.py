"""Interface of mlstm_kernels (2.0) for PyTorch: its kernels by name, and mLSTMBackend.

Heads come first: q, k (B, NH, S, DHQK), v (B, NH, S, DHHV), gate pre-activations i, f (B, NH, S), states c (B, NH,
DHQK, DHHV), n (B, NH, DHQK), m (B, NH, 1). Modules have the package's names: `mlstm_kernels.torch.backend_module`
becomes `tfla.integrations.mlstm_kernels.torch.backend_module`. docs/mlstm_kernels.md says what differs.
"""

from __future__ import annotations

from tfla.integrations.mlstm_kernels.backend import (
    BackendModeType,
    ChunkwiseKernelType,
    DtypeType,
    SequenceKernelType,
    StepKernelType,
    mLSTMBackend,
    mLSTMBackendConfig,
)
from tfla.integrations.mlstm_kernels.names import (
    get_available_mlstm_kernels,
    get_available_mlstm_sequence_kernels,
    get_available_mlstm_step_kernels,
    get_mlstm_kernel,
    get_mlstm_sequence_kernel,
    get_mlstm_step_kernel,
)

__all__ = [
    "BackendModeType",
    "ChunkwiseKernelType",
    "DtypeType",
    "SequenceKernelType",
    "StepKernelType",
    "mLSTMBackend",
    "mLSTMBackendConfig",
    "get_available_mlstm_kernels",
    "get_available_mlstm_sequence_kernels",
    "get_available_mlstm_step_kernels",
    "get_mlstm_kernel",
    "get_mlstm_sequence_kernel",
    "get_mlstm_step_kernel",
]
