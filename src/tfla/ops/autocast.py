"""The effect of autocast on a call: q, k and v are cast, and a backend computes in the dtypes that it gets."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


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


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v in the dtype of autocast, where it is on and they are not float64.

    As in PyTorch's attention; gates and states keep their dtypes.
    """
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
