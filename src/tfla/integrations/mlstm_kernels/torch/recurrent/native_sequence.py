"""The kernels that `mlstm_kernels.torch.recurrent.native_sequence` has, by their names there."""

from tfla.integrations.mlstm_kernels.names import recurrent_sequence as mlstm_recurrent_sequence__native_fw
from tfla.integrations.mlstm_kernels.names import recurrent_sequence as mlstm_recurrent_sequence__triton_step_fused_fw

__all__ = ["mlstm_recurrent_sequence__native_fw", "mlstm_recurrent_sequence__triton_step_fused_fw"]
