"""The kernels that `mlstm_kernels.torch.chunkwise.native` has, by their names there."""

from tfla.integrations.mlstm_kernels.names import chunkwise as mlstm_chunkwise__native_custbw
from tfla.integrations.mlstm_kernels.names import chunkwise_native_autograd as mlstm_chunkwise__native_autograd

__all__ = ["mlstm_chunkwise__native_autograd", "mlstm_chunkwise__native_custbw"]
