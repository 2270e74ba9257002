"""Several GPUs, on PyTorch's own distributed engine (docs/distributed.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfla.distributed.parallel_model import parallelize

__all__ = ["parallelize"]


def __getattr__(name: str) -> Any:
    """Import :func:`parallelize` where it is first used, since the operator imports this package without models."""
    if name == "parallelize":
        from tfla.distributed.parallel_model import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
