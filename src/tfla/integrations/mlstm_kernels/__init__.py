"""The interface of mlstm_kernels (2.0) for PyTorch, on tfla's operator: its kernels by name, and `mLSTMBackend`.

The dimension of heads comes before that of time:

- q, k (B, NH, S, DHQK) and v (B, NH, S, DHHV);
- the pre-activations of the gates i, f (B, NH, S);
- the states c (B, NH, DHQK, DHHV), n (B, NH, DHQK) and m (B, NH, 1).

Modules have the names that they have in that package: `mlstm_kernels.torch.backend_module` becomes
`tfla.integrations.mlstm_kernels.torch.backend_module`. docs/mlstm_kernels.md says what differs.
"""

from __future__ import annotations

from tfla.integrations.mlstm_kernels.kernels import (
    get_available_mlstm_kernels,
    get_available_mlstm_sequence_kernels,
    get_available_mlstm_step_kernels,
    get_mlstm_kernel,
    get_mlstm_sequence_kernel,
    get_mlstm_step_kernel,
)
from tfla.integrations.mlstm_kernels.torch.backend_module import (
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
    "get_available_mlstm_kernels",
    "get_available_mlstm_sequence_kernels",
    "get_available_mlstm_step_kernels",
    "get_mlstm_kernel",
    "get_mlstm_sequence_kernel",
    "get_mlstm_step_kernel",
]
