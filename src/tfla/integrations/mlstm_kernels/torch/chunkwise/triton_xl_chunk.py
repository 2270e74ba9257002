"""The kernel that `mlstm_kernels.torch.chunkwise.triton_xl_chunk` has, by its name there."""

from tfla.integrations.mlstm_kernels.names import chunkwise_xl as mlstm_chunkwise__xl_chunk

__all__ = ["mlstm_chunkwise__xl_chunk"]
