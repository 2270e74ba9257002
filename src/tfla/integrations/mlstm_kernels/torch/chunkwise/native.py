"""The kernels of `mlstm_kernels.torch.chunkwise.native`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import chunkwise as mlstm_chunkwise__native_custbw
from tfla.integrations.mlstm_kernels.kernels import chunkwise_native_autograd as mlstm_chunkwise__native_autograd

__all__ = ["mlstm_chunkwise__native_autograd", "mlstm_chunkwise__native_custbw"]
