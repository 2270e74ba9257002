"""The kernels of `mlstm_kernels.torch.recurrent.native_sequence`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import recurrent_sequence as mlstm_recurrent_sequence__native_fw
from tfla.integrations.mlstm_kernels.kernels import recurrent_sequence as mlstm_recurrent_sequence__triton_step_fused_fw

__all__ = ["mlstm_recurrent_sequence__native_fw", "mlstm_recurrent_sequence__triton_step_fused_fw"]
