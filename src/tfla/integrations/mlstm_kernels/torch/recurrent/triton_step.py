"""The kernel of `mlstm_kernels.torch.recurrent.triton_step`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import recurrent_step as mlstm_recurrent_step__triton

__all__ = ["mlstm_recurrent_step__triton"]
