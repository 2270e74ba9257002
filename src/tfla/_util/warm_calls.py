"""Calls that are made once so that their kernels are compiled, and the record of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class WarmCall:
    """A kind of call that has been made once."""

    name: str
    seconds: float  # the time of the first call, compilation included
    again: float  # the time of the second call
    kernels: tuple[str, ...]  # names of the kernels that Triton compiled, or loaded from its cache


@dataclass(frozen=True)
class Warmup:
    """The record of a warm-up; its string has one line for each call."""

    device: str
    calls: tuple[WarmCall, ...]

    def __str__(self) -> str:
        if not self.calls:
            return f"{self.device}: there is nothing to compile"
        lines = [
            f"{call.name}: {call.seconds:.2f} s, again {call.again * 1e3:.1f} ms, {len(call.kernels)} kernels compiled"
            for call in self.calls
        ]
        return "\n".join(lines)


def compiles(device: torch.device) -> bool:
    """Return whether calls on a device compile kernels."""
    return device.type == "cuda"


def measured(name: str, call: Callable[[], object], device: torch.device) -> WarmCall:
    """Make a call twice, and return the times of both and the kernels that it compiled."""
    seconds = []
    with compiled_kernels() as kernels:
        for _ in range(2):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return WarmCall(name, seconds[0], seconds[1], tuple(kernels))


@contextlib.contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Collect the names of the kernels that Triton compiles in the body of a `with` statement.

    A hook that is set already is called too. Without Triton, or with a version that has no such hook, there are none.
    """
    found: list[str] = []
    try:
        from triton import knobs

        before: Any = knobs.runtime.jit_post_compile_hook
    except (ImportError, AttributeError):
        yield found
        return

    def hook(*args: Any, **kwargs: Any) -> Any:
        """Take the name of the kernel from its description, such as ``name[num_warps: 4, ...](...)``."""
        text = kwargs.get("repr") or next((a for a in args if isinstance(a, str) and "[" in a), "")
        found.append(text.partition("[")[0])
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
