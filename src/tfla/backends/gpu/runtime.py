"""The facts about Triton that are available without importing it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
# A chunk size that no sequence reaches: the launch code chooses one at each call, and the backward recomputes the
# states.
DEFERRED_CHUNK_SIZE = 1 << 30
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def constant(fn: F) -> F:
    """Mark fn as torch.compiler.assume_constant_result does, without the slow import of torch.compiler."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


class PlannedGPU(NamedTuple):
    """The GPU that launches are planned for, on tensors of the meta device, instead of being run."""

    architecture: int  # compute capability, 90 for 9.0
    processors: int  # multiprocessors
    float32_products: str  # how float32 is multiplied: "ieee", "tf32x3" or "tf32"


_PLANNED: ContextVar[PlannedGPU | None] = ContextVar("_PLANNED", default=None)


@contextmanager
def planned_for(gpu: PlannedGPU) -> Iterator[None]:
    """Let tensors of the meta device stand for tensors of a GPU in the body of a `with` statement."""
    token = _PLANNED.set(gpu)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planned_gpu(device: torch.device) -> PlannedGPU | None:
    """Return the GPU that tensors of this device stand for, or None for devices that stand for themselves."""
    return _PLANNED.get() if device.type == "meta" else None
