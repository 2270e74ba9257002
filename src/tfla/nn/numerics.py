"""Numerics that several layers share: precision, the soft cap, and what the backward recomputes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tfla.ops.signature import autocast_dtype
from tfla.ops.transforms import observed


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), equation (110): x near 0, never beyond +-cap. Any shape, dtype of x."""
    return cap * torch.tanh(x / cap)


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_once(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast gives to the input of a projection; x itself without autocast or in float64.

    Several projections read the same normalized x. Without this, each of them would keep a cast copy of its own for the
    backward.
    """
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), of which the backward keeps only the inputs and recomputes the rest.

    It is meant for elementwise functions and norms: their float32 intermediates take more memory than 16-bit inputs.
    Under torch.compile, torch.func and tracers the function is called as it is: a compiler decides by itself what it
    recomputes, and torch.func does not support the hooks of a checkpoint.
    """
    if not torch.is_grad_enabled() or observed(inputs):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
