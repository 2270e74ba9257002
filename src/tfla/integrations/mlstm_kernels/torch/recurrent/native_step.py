"""The kernel of `mlstm_kernels.torch.recurrent.native_step`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import recurrent_step as mlstm_recurrent_step__native

__all__ = ["mlstm_recurrent_step__native"]
