"""Several GPUs, on PyTorch's own distributed engine (docs/distributed.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfla.ops.context_parallel.group import ContextParallel

if TYPE_CHECKING:
    from tfla.distributed.parallel_model import parallelize

__all__ = ["ContextParallel", "parallelize"]


def __getattr__(name: str) -> Any:
    """Import :func:`parallelize` where it is first used, since it needs models."""
    if name == "parallelize":
        from tfla.distributed.parallel_model import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
