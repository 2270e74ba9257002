"""Python's garbage collection, paused while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Leave objects in reference cycles alone until the context ends.

    A CUDA graph that is destroyed while another one is captured makes the capture fail, and PyTorch since 2.9 no longer
    collects garbage before a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
