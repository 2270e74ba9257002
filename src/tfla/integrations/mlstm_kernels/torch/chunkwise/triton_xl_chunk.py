"""The kernel of `mlstm_kernels.torch.chunkwise.triton_xl_chunk`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import chunkwise_xl as mlstm_chunkwise__xl_chunk

__all__ = ["mlstm_chunkwise__xl_chunk"]
