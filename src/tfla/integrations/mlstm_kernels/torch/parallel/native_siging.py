"""The kernels of `mlstm_kernels.torch.parallel.native_siging`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import parallel_siging as mlstm_siging_parallel__native_custbw
from tfla.integrations.mlstm_kernels.kernels import parallel_siging_autograd as mlstm_siging_parallel__native_autograd

__all__ = ["mlstm_siging_parallel__native_autograd", "mlstm_siging_parallel__native_custbw"]
