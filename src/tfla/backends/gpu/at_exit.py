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
    """Wait until the backward thread of that GPU has dropped the gradients of earlier backwards.

    The thread runs one backward after the other, so that those before a further one have ended when that one has.
    """
    with contextlib.suppress(Exception), torch.enable_grad():  # a GPU that has failed computes no backward to wait for
        torch.ones(1, device=device, requires_grad=True).sum().backward()


@functools.cache
def settle_at_exit(device: torch.device) -> None:
    """Let the end of the process wait until the backward thread of this GPU has dropped its last gradient."""
    atexit.register(_settle, device)
