"""The kernels of `mlstm_kernels.torch.parallel.native`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import parallel as mlstm_parallel__native_custbw
from tfla.integrations.mlstm_kernels.kernels import parallel_autograd as mlstm_parallel__native_autograd

__all__ = ["mlstm_parallel__native_autograd", "mlstm_parallel__native_custbw"]
