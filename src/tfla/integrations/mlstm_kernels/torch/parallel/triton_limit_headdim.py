"""The kernel that `mlstm_kernels.torch.parallel.triton_limit_headdim` has, by its name there."""

from tfla.integrations.mlstm_kernels.names import parallel as mlstm_parallel__limit_headdim

__all__ = ["mlstm_parallel__limit_headdim"]
