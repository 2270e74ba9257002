"""The accelerators and their rates: FLOP/s of matrix products and byte/s of the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Accelerator:
    """The two rates of an accelerator, and their source."""

    name: str
    flops: float
    """FLOP/s of matrix products in 16 bits, without sparsity (float32 on a CPU)."""
    bandwidth: float
    """Byte/s of its memory."""
    source: str

    def __post_init__(self) -> None:
        for what, rate in (("flops", self.flops), ("bandwidth", self.bandwidth)):
            if not rate > 0:
                raise ValueError(f"{what} of {self.name}: got {rate}, it is above 0")

    @property
    def intensity(self) -> float:
        """Return the FLOP per byte above which matrix products are the bound (117)."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: Any) -> Any:
        """Return the roofline (119): the FLOP/s that a kernel of so many FLOP per byte can reach, number or array."""
        import numpy as np

        return np.minimum(self.bandwidth * intensity, self.flops)


PAPER = "the paper's Table 18"
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("V100", 120e12, 0.9e12, PAPER),
        Accelerator("A100", 312e12, 1.935e12, PAPER),
        Accelerator("H100", 989e12, 3.35e12, PAPER),
        Accelerator("H200", 989e12, 4.8e12, "NVIDIA's data sheet of the H200 SXM"),
        Accelerator("B200", 2250e12, 7.7e12, PAPER),
    )
}


def of_result(result: dict[str, Any]) -> Accelerator:
    """Return the rates of a stored benchmark's machine: a large matrix product and a device copy, rested."""
    rates, env = result["rates"], result["environment"]
    name = f"{env['device'].removeprefix('NVIDIA ')}, measured"
    return Accelerator(name, rates["gemm"]["rested"], rates["copy"]["rested"], f"tfla bench gpu, {env['date']}")


@cache
def measured(device: str) -> Accelerator:
    """Measure the rates of this machine, in a second or two.

    Args:
        device: "cpu" or a CUDA device.

    Raises:
        RuntimeError: there is no such device.
    """
    import torch

    from tfla.measure.machine import environment, rates
    from tfla.measure.timing import Sampling

    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(f"there is no {device} device here to measure")
    found = rates(device, Sampling(repeats=10, warmup=3, pause=0.01, patience=0.5, sustained=0.0))
    return replace(of_result({"rates": found, "environment": environment(device)}), source="measured here")
