"""Checks that the models and their functions share; every message names the argument, what was given and what fits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SEEDS = (-(2**63), 2**64 - 1)  # what torch.Generator.manual_seed takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless value is an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}: got {value}, expected at least {low}" + ("" if high is None else f" and at most {high}")
        )


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Raise unless value is a finite int or float, above a bound where there is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    if not math.isfinite(value) or (above is not None and value <= above):
        raise ValueError(f"{name}: got {value}, expected a finite number{'' if above is None else f' above {above:g}'}")


def check_ids(ids: object, shape: str, dims: int) -> None:
    """Raise unless ids are integers in so many dimensions; their values are not read."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids: got {kind_of(ids)}, expected an int64 tensor")
    if ids.dim() != dims:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected {shape}")


def check_vocabulary(ids: Tensor, vocab_size: int) -> None:
    """Raise unless all ids are tokens; their values are read, which waits for a GPU."""
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"ids: got tokens from {low} to {high}, expected from 0 to {vocab_size - 1}, the vocabulary")


def check_weights_dtype(dtype: object) -> None:
    """Raise unless weights can be in that dtype; None is that of the file."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: got {dtype!r}, expected a torch.dtype or None")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype}, expected one of {', '.join(map(str, DTYPES))}")


def kind_of(x: object) -> str:
    """Return what an error calls something that is of the wrong type."""
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
