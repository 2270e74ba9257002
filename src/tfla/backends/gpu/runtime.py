"""What is known about Triton and the GPU without importing Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
LATER = 1 << 30  # a chunk size that no sequence reaches: each call picks one, and its backward makes the states again
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def constant(fn: F) -> F:
    """torch.compiler.assume_constant_result without its import, which takes longer than that of all the rest."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
