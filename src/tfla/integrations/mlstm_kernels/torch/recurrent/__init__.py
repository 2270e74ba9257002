"""The kernels of `mlstm_kernels.torch.recurrent`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import SEQUENCE_KERNELS as registry_sequence
from tfla.integrations.mlstm_kernels.kernels import STEP_KERNELS as registry_step
from tfla.integrations.mlstm_kernels.torch.recurrent.native_sequence import (
    mlstm_recurrent_sequence__native_fw,
    mlstm_recurrent_sequence__triton_step_fused_fw,
)
from tfla.integrations.mlstm_kernels.torch.recurrent.native_step import mlstm_recurrent_step__native
from tfla.integrations.mlstm_kernels.torch.recurrent.triton_step import mlstm_recurrent_step__triton

__all__ = [
    "mlstm_recurrent_sequence__native_fw",
    "mlstm_recurrent_sequence__triton_step_fused_fw",
    "mlstm_recurrent_step__native",
    "mlstm_recurrent_step__triton",
    "registry_sequence",
    "registry_step",
]
