"""Launches that take the host little time.

Triton looks a kernel up by every argument of every launch, which takes it longer than all the rest of a launch. What a
call launches, in order, follows from the sizes of what it reads: a second call like a former one takes its kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

import triton
from torch import Tensor

REMEMBERED = 1024  # calls
AUTOTUNE = "TFLA_AUTOTUNE"  # environment variable: "1" before the first call has Triton time warps and stages


def static(x: Tensor | None) -> Hashable:
    """All that kernels are compiled for, of a tensor."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)


@functools.lru_cache(maxsize=REMEMBERED)
def _kernels(call: Hashable) -> dict[int, Any]:
    """Of such calls, by the place among their launches: threads that find one at the same time find the same."""
    return {}


@functools.cache
def autotuned(kernel: Any, constants: tuple[str, ...], stages: int) -> Any:
    """By Triton's autotuner, once for all of these constants: four configurations."""
    configs = [triton.Config({"STAGES": n}, num_warps=warps) for warps in (4, 8) for n in (stages, stages + 1)]
    return triton.autotune(configs, key=[name for name in constants if name != "STAGES"])(kernel)


class Launches:
    """Those of one call, on the current device; `call`: all that kernels and their order depend on, None to forget."""

    def __init__(self, call: Hashable) -> None:
        self.kernels = {} if call is None else _kernels(call)
        self.count = 0

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, tunable: bool = False, **constants: Any
    ) -> None:
        """As kernel[grid](*args, num_warps=num_warps, **constants), the constants being the last parameters.

        tunable: its warps and stages are free, and it may run twice, since it reads nothing that it writes.
        """
        known = self.kernels.get(self.count)
        if known is None:
            options = {"enable_fp_fusion": True}  # which Triton 3.10 no longer does unasked
            if tunable and os.environ.get(AUTOTUNE) == "1":
                chosen = {name: x for name, x in constants.items() if name != "STAGES"}
                run = autotuned(kernel, tuple(constants), constants["STAGES"])[grid]
                self.kernels[self.count] = run(*args, **options, **chosen)
            else:
                self.kernels[self.count] = kernel[grid](*args, num_warps=num_warps, **options, **constants)
        else:
            pointers = (x.data_ptr() if type(x) is Tensor else x for x in args)
            known[(*grid, 1, 1)[:3]](*pointers, *constants.values())  # which are compiled in, in whatever order
        self.count += 1


Arguments = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def launch(call: Hashable, tensors: tuple[Tensor, ...], arguments: Callable[[], Arguments]) -> None:
    """The only launch of a call, on the current device.

    `arguments`: the kernel, its grid, what follows the tensors among its parameters, and constants with num_warps. They
    are asked for once for equal `call`, each time where that is None.
    """
    known = {} if call is None else _kernels(call)
    if known:
        run, rest = known[0]
        run(*[x.data_ptr() for x in tensors], *rest)
        return
    kernel, grid, rest, constants = arguments()
    found = kernel[grid](*tensors, *rest, enable_fp_fusion=True, **constants)
    if call is not None:
        compiled_in = (value for name, value in constants.items() if name != "num_warps")
        known[0] = found[(*grid, 1, 1)[:3]], (*rest, *compiled_in)
