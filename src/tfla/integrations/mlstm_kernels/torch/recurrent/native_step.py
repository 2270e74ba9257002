"""The kernel that `mlstm_kernels.torch.recurrent.native_step` has, by its name there."""

from tfla.integrations.mlstm_kernels.names import recurrent_step as mlstm_recurrent_step__native

__all__ = ["mlstm_recurrent_step__native"]
