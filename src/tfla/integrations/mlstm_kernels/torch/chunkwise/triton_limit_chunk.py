"""The kernel of `mlstm_kernels.torch.chunkwise.triton_limit_chunk`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import chunkwise as mlstm_chunkwise__limit_chunk

__all__ = ["mlstm_chunkwise__limit_chunk"]
