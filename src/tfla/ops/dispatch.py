"""The choice of backend, kernel and chunk size of a call, and the call signature under which it is cached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tfla.backends import Backend, Inputs, select
from tfla.backends.base import static
from tfla.ops import tuned
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher

Find = Callable[[Inputs, str, str | None, bool], tuned.Entry | None]


def call_signature(
    given: tuple[Tensor | None, ...], state: State | None, lengths: Tensor | None, *options: Hashable
) -> Hashable:
    """Return everything that the checks and the choice of a call depend on, or None where the call cannot be cached.

    A call cannot be cached where the dispatcher has to see it, where an argument is no tensor or no State, and where
    ``lengths`` is on a CPU, since the checks then depend on its values.

    Args:
        given: the tensors of the call; the first one is present in every valid call.
        state: the initial state.
        lengths: `cu_seqlens` of packed sequences, or the lengths of decoding steps.
        options: every other argument of the call.
    """
    if type(state) is not State and state is not None:
        return None
    tensors = *given, *(state or (None, None, None)), lengths
    if needs_dispatcher(tensors) or given[0] is None or (lengths is not None and lengths.device.type == "cpu"):
        return None
    autocast = autocast_dtype(given[0].device.type)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return autocast, recorded, options, static(*tensors)


def choose(
    x: Inputs, normalize: bool, backend: str | None, kernel: str | None, chunk_size: int | None, find: Find = tuned.find
) -> tuple[Backend, str, int]:
    """Choose what runs a call, in this order: what the caller asks for, what `tfla tune` found, the backend's default.

    Args:
        x: the inputs of the call.
        normalize: whether the call has a normalizer.
        backend, kernel, chunk_size: what the caller asks for; None leaves the choice open.
        find: the function that looks up the tuned entry of a shape.

    Returns:
        the backend, the name of its kernel and the chunk size.

    Raises:
        ValueError: no backend or kernel has that name, or it cannot run these inputs (the message says why).
    """
    chosen = select(backend, x)
    if kernel is not None and (not isinstance(kernel, str) or kernel not in chosen.kernels):
        allowed = ", ".join(map(repr, chosen.kernels))
        raise ValueError(f"kernel: got {kernel!r}, backend {chosen.name!r} has {allowed}")
    if kernel is not None and (why := chosen.kernel_unsupported(x, kernel)) is not None:
        raise ValueError(f"kernel: {kernel!r} of backend {chosen.name!r} cannot run these inputs: {why}")
    found = find(x, chosen.name, kernel, normalize) if chunk_size is None else None
    if found is not None:
        return chosen, found.kernel, found.chunk_size
    kernel = chosen.default_kernel(x, chunk_size) if kernel is None else kernel
    return chosen, kernel, chunk_size or chosen.default_chunk_size(x, kernel)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this type of device, None where it is off or there is none."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on this type of device.

    Where autocast is off already the context does nothing, because entering `torch.autocast` costs host time.
    """
    return torch.autocast(device, enabled=False) if autocast_dtype(device) else contextlib.nullcontext()
