"""The kernel of `mlstm_kernels.torch.parallel.triton_limit_headdim`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import parallel as mlstm_parallel__limit_headdim

__all__ = ["mlstm_parallel__limit_headdim"]
