"""The facts about Triton that are available without importing it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

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
