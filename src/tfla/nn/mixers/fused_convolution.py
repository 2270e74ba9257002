"""The short causal convolution on a GPU, as one kernel for the forward and one for the backward.

The kernels and their equations are in :mod:`tfla.nn.mixers.convolution_kernels`.
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.mixers import plain_convolution
from tfla.nn.mixers.eager_kernels import tensors_unsupported
from tfla.ops.derivatives import recorded_gradients

MAX_SIZE = 8  # a thread has inputs and sums of so many tokens of its channels in registers
TILE = {"TOKENS": 128, "CHANNELS": 256, "num_warps": 2}  # a program's tokens and channels, 4 channels a thread
UNROLL = {"convolve": 8, "convolve_backward": 4}  # rows that a program loads at a time


def unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why :func:`convolve` does not take these tensors, or None if it does.

    Other calls run :func:`tfla.nn.mixers.plain_convolution.convolve`.
    """
    if (why := tensors_unsupported(x, weight, bias)) is not None:
        return why
    if not 1 <= weight.shape[1] <= MAX_SIZE:
        return f"it takes up to {MAX_SIZE} tokens"
    if x.shape[2:] != weight.shape[:1]:
        return "it takes weights for each channel"
    return None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, before: int) -> Tensor:
    """Convolve in float32.

    Args:
        x: (B, before + T, channels), the inputs after those before the first token.
        weight: (channels, size), the weight of the newest input last.
        bias: (channels,) or None.
        first: (B, T) or (1, T), the index of the first token of each token's document, or None.
        before: the number of inputs before the first token; earlier ones are zeros.

    Returns:
        (B, T, channels) in x's dtype.
    """
    y: Tensor = _FusedConvolution.apply(x, weight, bias, first, before)
    return y


class _FusedConvolution(torch.autograd.Function):
    """The convolution, whose backward keeps only its inputs."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, before: int) -> Tensor:
        y = x.new_empty(x.shape[0], x.shape[1] - before, x.shape[2])
        operands = _operands(x, weight, bias, first)
        _launch("convolve", y.shape[1], x, *operands, y, y.shape[1], x.shape[2], SIZE=weight.shape[1], BEFORE=before)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.before = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, first = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            return *recorded_gradients(partial(_plain, first, ctx.before), (x, weight, bias), dy), None, None
        (B, rows, channels), size = x.shape, weight.shape[1]
        dy = _rows(dy)
        dx = x.new_empty(x.shape)
        shape = B * -(-rows // TILE["TOKENS"]), size + (bias is not None), channels
        sums = x.new_empty(shape, dtype=torch.float32)
        _launch(
            "convolve_backward", rows, x, *_operands(x, weight, bias, first), dy, *dy.stride()[:2], dx, sums,
            rows - ctx.before, channels, SIZE=size, BEFORE=ctx.before,
        )  # fmt: skip
        total = sums.sum(0)
        db = None if bias is None else total[size].to(bias.dtype)
        return dx, total[:size].T.contiguous().to(weight.dtype), db, None, None


def _plain(first: Tensor | None, before: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute :func:`convolve` by operations that autograd knows."""
    padded = F.pad(x, (0, 0, weight.shape[1] - 1 - before, 0))
    return plain_convolution.convolve(F.silu, padded, weight, bias, first, None)


def _rows(x: Tensor) -> Tensor:
    """Return x (B, T, channels), copied if the channels of a token are not next to each other."""
    return x if x.stride(2) == 1 else x.contiguous()


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None) -> list[Any]:
    """Return the operands of a kernel from X to the strides of First."""
    x, weight = _rows(x), weight.T.contiguous()  # so that a program reads the weights of its channels together
    strides = (0, 0) if first is None else (first.stride(0) if len(first) > 1 else 0, first.stride(1))
    return [x, *x.stride()[:2], weight, None if bias is None else bias.contiguous(), first, *strides]


def _launch(kernel: str, rows: int, x: Tensor, *operands: Any, **constants: int) -> None:
    """Launch a kernel on the tiles of x (B, ., channels) with so many rows in each sequence."""
    tiles = x.shape[0] * -(-rows // TILE["TOKENS"]) * -(-x.shape[2] // TILE["CHANNELS"])
    if not tiles:
        return
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        run = getattr(_kernels(), kernel)[(tiles,)]
        run(*operands, **constants, **TILE, UNROLL=UNROLL[kernel], enable_fp_fusion=True)


def _kernels() -> ModuleType:
    """Return the module of the kernels, which imports Triton."""
    from tfla.nn.mixers import convolution_kernels

    return convolution_kernels
