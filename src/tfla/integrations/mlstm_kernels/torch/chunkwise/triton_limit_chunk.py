"""The kernel that `mlstm_kernels.torch.chunkwise.triton_limit_chunk` has, by its name there."""

from tfla.integrations.mlstm_kernels.names import chunkwise as mlstm_chunkwise__limit_chunk

__all__ = ["mlstm_chunkwise__limit_chunk"]
