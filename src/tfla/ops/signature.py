"""What tells calls apart: a kernel takes less time than checks and choices do, which are made once for calls alike."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tfla.backends.base import static
from tfla.ops.state import State
from tfla.ops.transforms import observed


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this type of device, None where it is off or there is none."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast(device, enabled=False), which takes the host a while, where that changes anything."""
    return torch.autocast(device, enabled=False) if autocast_dtype(device) else contextlib.nullcontext()


def signature(
    given: tuple[Tensor | None, ...], state: State | None, lengths: Tensor | None, *options: Hashable
) -> Hashable:
    """All that checks and choices ask for; None where they have to be made: of a call that is observed, of what are no
    tensors, and of lengths that can be read."""
    if type(state) is not State and state is not None:
        return None
    tensors = *given, *(state or (None, None, None)), lengths
    if observed(tensors) or given[0] is None or (lengths is not None and lengths.device.type == "cpu"):
        return None
    autocast = autocast_dtype(given[0].device.type)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return autocast, recorded, options, static(*tensors)
