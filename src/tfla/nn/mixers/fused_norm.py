"""The norm with an output gate on a GPU, as one kernel for the forward and one for the backward.

The kernels and their equations are in :mod:`tfla.nn.mixers.norm_kernels`.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.mixers import plain_norm
from tfla.nn.mixers.eager_kernels import tensors_unsupported
from tfla.ops.derivatives import recorded_gradients

Activation = Literal["silu", "sigmoid"]
LARGEST = 8192  # numbers of a row, which a program holds in registers
ELEMENTS = 4096  # that a program of the forward has at a time, in several rows or in one; in the backward half of it
Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]  # h, gate, v, weight and factors
SHARED_BYTES = 2**16  # of a program of the backward, for the rows that are loaded ahead
STEPS = 16  # rows, or groups of rows, of which a program of the backward adds up what the weight gets


class Skip(NamedTuple):
    """A skip connection, which is added to the rows: the factors times v."""

    v: Tensor  # (..., dim), like the rows
    factors: Tensor  # (parts,), of which each belongs to dim / parts numbers of a row

    def added_to(self, h: Tensor) -> Tensor:
        """Return h with the skip connection in the dtype of h."""
        by_parts = self.v.unflatten(-1, (self.factors.shape[0], -1)) * self.factors[:, None]
        return h + by_parts.flatten(-2).to(h.dtype)


def unsupported(h: Tensor, weight: Tensor, gate: Tensor | None, skip: Skip | None = None) -> str | None:
    """Return why :func:`gated_norm` does not take these tensors, or None if it does.

    Other calls run :func:`tfla.nn.mixers.plain_norm.gated_norm`.
    """
    if (why := tensors_unsupported(h, weight, gate, *(skip or ()))) is not None:
        return why
    if skip is not None and (skip.v.shape != h.shape or weight.ndim > 1 or h.shape[-1] % skip.factors.shape[0]):
        return "it takes a number of the skip connection for each number, and a weight for each number of a row"
    if not 1 <= h.shape[-1] <= LARGEST or (gate is not None and gate.shape != h.shape):
        return f"it takes rows of up to {LARGEST:,} numbers, and a gate for each number"
    if h.shape[h.ndim - weight.ndim :] != weight.shape:
        return "it takes a weight for each number of a row, or of a row of each head"
    return None


class Options(NamedTuple):
    """The epsilon, the activation and the form of a norm with an output gate."""

    eps: float
    activation: Activation
    gate_first: bool = False
    centered: bool = False  # whether the norm is LayerNorm; otherwise it is RMSNorm

    def plain(
        self, h: Tensor, weight: Tensor, gate: Tensor | None, v: Tensor | None = None, factors: Tensor | None = None
    ) -> Tensor:
        """Compute :func:`gated_norm` by operations that autograd knows."""
        if v is not None and factors is not None:
            h = Skip(v, factors).added_to(h)
        function = F.silu if self.activation == "silu" else torch.sigmoid
        return plain_norm.gated_norm(self.eps, function, self.gate_first, None, h, weight, gate, self.centered)


def gated_norm(h: Tensor, weight: Tensor, gate: Tensor | None, options: Options, skip: Skip | None = None) -> Tensor:
    """Compute the norm in float32.

    Args:
        h: (..., dim).
        weight: (dim,), or (heads, dim) where h is (..., heads, dim).
        gate: (..., dim) or None.
        options: what is computed.
        skip: what is added to h before, or None.

    Returns:
        (..., dim) in the dtype of h.
    """
    y: Tensor = _FusedNorm.apply(h, weight, gate, *(skip or (None, None)), options)
    return y


class _FusedNorm(torch.autograd.Function):
    """The norm, whose backward keeps only its inputs."""

    @staticmethod
    def forward(
        h: Tensor, weight: Tensor, gate: Tensor | None, v: Tensor | None, factors: Tensor | None, options: Options
    ) -> Tensor:
        y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        _launch("gated_norm", 1, ELEMENTS, (h, gate, v, weight, factors), (y,), options)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, gate, v, factors = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            return *recorded_gradients(ctx.options.plain, inputs, dy), None
        dh, dgate, dv = found = [
            None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (h, gate, v)
        ]
        programs = -(-(h.numel() // weight.numel()) // (STEPS * _rows_at_a_time(h.shape[-1], ELEMENTS // 2)))
        sums = torch.empty(programs, *weight.shape, dtype=torch.float32, device=h.device)
        factor_sums = None if factors is None else torch.empty_like(sums)
        given = h, gate, v, weight, factors
        written = dy, *found, sums, factor_sums
        stages = _stages(ELEMENTS // 2, h, gate, v, dy)
        _launch("gated_norm_backward", STEPS, ELEMENTS // 2, given, written, ctx.options, STEPS=STEPS, STAGES=stages)
        dfactors = None
        if factors is not None and factor_sums is not None:
            dfactors = factor_sums.sum(0).unflatten(-1, (factors.shape[0], -1)).sum(-1).to(factors.dtype)
        return dh, sums.sum(0).to(weight.dtype), dgate, dv, dfactors, None


def _columns(dim: int) -> int:
    """Return the smallest power of 2 that is dim or above it."""
    return 1 << (dim - 1).bit_length()


def _rows_at_a_time(dim: int, elements: int) -> int:
    """Return the number of rows of dim numbers that a program has at a time."""
    return max(1, elements // _columns(dim))


def _stages(elements: int, *read: Tensor | None) -> int:
    """Return how many times the rows that a program reads of tensors (..., dim) fit in the shared memory of any GPU."""
    present = [t for t in read if t is not None]
    dim = present[0].shape[-1]
    at_once = sum(t.element_size() for t in present) * _columns(dim) * _rows_at_a_time(dim, elements)
    return min(3, 1 + SHARED_BYTES // at_once)  # one time is in registers


def _launch(
    kernel: str, steps: int, elements: int, inputs: Inputs, others: tuple[Tensor | None, ...], options: Options,
    **constants: int,
) -> None:  # fmt: skip
    """Launch a kernel, whose programs have so many elements at a time."""
    h, gate, _, weight, factors = inputs
    dim, rows = h.shape[-1], h.numel() // weight.numel()
    at_a_time = _rows_at_a_time(dim, elements)
    if not rows:
        return
    with torch.cuda.device(h.device) if h.is_cuda else contextlib.nullcontext():
        getattr(_kernels(), kernel)[(-(-rows // (steps * at_a_time)), weight.numel() // dim)](
            *(None if t is None else t.contiguous() for t in (*inputs, *others)), rows, options.eps, D=dim,
            SKIP_SIZE=0 if factors is None else dim // factors.shape[0], GATED=gate is not None,
            SILU=options.activation == "silu", GATE_FIRST=options.gate_first, CENTERED=options.centered,
            ROWS=at_a_time, COLUMNS=_columns(dim), **constants, num_warps=4 if _columns(dim) <= ELEMENTS // 2 else 8,
        )  # fmt: skip


def _kernels() -> ModuleType:
    """Return the module of the kernels, which imports Triton."""
    from tfla.nn.mixers import norm_kernels

    return norm_kernels
