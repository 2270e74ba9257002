"""A clean end of processes that have run a backward on a GPU.

PyTorch runs the backward of a GPU in a thread of its own, which drops the last references to gradients a moment after
the caller has them. A gradient that Python code has made needs the interpreter's lock for that. If the interpreter is
ending by then, CPython ends the thread instead, inside a destructor, and C++ aborts the process with "terminate called
without an active exception" (https://github.com/pytorch/pytorch/issues/190489 has the mechanism).
"""

from __future__ import annotations

import atexit
import contextlib
import functools

import torch


def _settle(device: torch.device) -> None:
    """Wait until the thread of that GPU has dropped what earlier backwards left: it works off one backward a time."""
    with contextlib.suppress(Exception), torch.enable_grad():  # of a GPU that has failed nothing is left to wait for
        torch.ones(1, device=device, requires_grad=True).sum().backward()


@functools.cache
def settle_at_exit(device: torch.device) -> None:
    """Have the process end only after the backwards of this GPU have, to the last reference."""
    atexit.register(_settle, device)
