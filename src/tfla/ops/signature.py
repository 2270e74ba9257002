"""What tells calls apart: a kernel takes less time than checks and choices do, which are made once for calls alike."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tfla.backends.base import static
from tfla.ops.state import State

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def observed(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a tracer, a mode, a transform or a subclass of Tensor has to see the operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or not PLAIN.issuperset(map(type, tensors))
        or (tensors[0] is not None and tensors[0].is_meta)
    )


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast(device, enabled=False), which takes the host a while, where that changes anything."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


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
    device = given[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return autocast, recorded, options, static(*tensors)
