"""The kernels of `mlstm_kernels.torch.parallel`, with their names there."""

from tfla.integrations.mlstm_kernels.kernels import KERNELS
from tfla.integrations.mlstm_kernels.torch.parallel.native import (
    mlstm_parallel__native_autograd,
    mlstm_parallel__native_custbw,
)
from tfla.integrations.mlstm_kernels.torch.parallel.native_siging import (
    mlstm_siging_parallel__native_autograd,
    mlstm_siging_parallel__native_custbw,
)
from tfla.integrations.mlstm_kernels.torch.parallel.native_stablef import (
    mlstm_parallel__native_stablef_autograd,
    mlstm_parallel__native_stablef_custbw,
)
from tfla.integrations.mlstm_kernels.torch.parallel.triton_limit_headdim import mlstm_parallel__limit_headdim

__all__ = [
    "mlstm_parallel__limit_headdim",
    "mlstm_parallel__native_autograd",
    "mlstm_parallel__native_custbw",
    "mlstm_parallel__native_stablef_autograd",
    "mlstm_parallel__native_stablef_custbw",
    "mlstm_siging_parallel__native_autograd",
    "mlstm_siging_parallel__native_custbw",
    "registry",
]
registry = {name.partition("--")[2]: kernel for name, kernel in KERNELS.items() if name.startswith("parallel--")}
