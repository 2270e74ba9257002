"""The kernel of `mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging`, with its name there."""

from tfla.integrations.mlstm_kernels.kernels import chunkwise_xl_siging as mlstm_siging_chunkwise__xl_chunk

__all__ = ["mlstm_siging_chunkwise__xl_chunk"]
