"""The kernels of `mlstm_kernels.torch.chunkwise`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import KERNELS
from tfla.integrations.mlstm_kernels.torch.chunkwise.native import (
    mlstm_chunkwise__native_autograd,
    mlstm_chunkwise__native_custbw,
)
from tfla.integrations.mlstm_kernels.torch.chunkwise.triton_limit_chunk import mlstm_chunkwise__limit_chunk
from tfla.integrations.mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk
from tfla.integrations.mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

__all__ = [
    "mlstm_chunkwise__limit_chunk",
    "mlstm_chunkwise__native_autograd",
    "mlstm_chunkwise__native_custbw",
    "mlstm_chunkwise__xl_chunk",
    "mlstm_siging_chunkwise__xl_chunk",
    "registry",
]
registry = {name.partition("--")[2]: kernel for name, kernel in KERNELS.items() if name.startswith("chunkwise--")}
