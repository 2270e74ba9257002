"""The pre-activations of a gate in float32 from inputs in bfloat16, by products of tensor cores.

A float32 number is the sum of three bfloat16 numbers, each of which is what the ones before it leave, rounded. The
products of bfloat16 numbers are exact in float32, and their sums are float32. With W = W_1 + W_2 + W_3 and the
cotangent dz = d_1 + d_2 + d_3 of z = x W^T + b,

    z = x W_1^T + x W_2^T + x W_3^T + b                                            (1)
    dW = d_1^T x + d_2^T x + d_3^T x                                               (2)
    dx = the sum of d_i W_j over i + j <= 4                                        (3)

(3) leaves out terms below 2^-24 of the largest. Each of the three is one product, of matrices beside each other, and
reads or writes no copy of x in float32. Weights in bfloat16 are one part, W_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfla.nn.soft_cap import soft_cap
from tfla.ops.derivatives import recorded_gradients
from tfla.ops.transforms import PLAIN, compiles_alone, needs_dispatcher

PARTS = 3  # bfloat16 numbers whose sum is a float32 number


def unsupported(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Return why :func:`preactivations` does not take these tensors, or None if it does."""
    tensors = x, weight, bias
    if needs_dispatcher(tensors) and not (compiles_alone() and all(type(t) in PLAIN for t in tensors)):
        return "a transform, a tracer other than torch.compile's or a subclass of Tensor takes part"
    if x.dtype != torch.bfloat16 or not {weight.dtype, bias.dtype}.issubset((torch.bfloat16, torch.float32)):
        return "the inputs are bfloat16, weights and biases bfloat16 or float32"
    if x.device.type != "cuda" or torch.version.cuda is None or {x.device} != {weight.device, bias.device}:
        return "all tensors are on one NVIDIA GPU"
    return None if hasattr(torch.ops.aten.mm, "dtype") else "products of bfloat16 in float32 need PyTorch 2.8 or newer"


def preactivations(x: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    """Return cap tanh((W x + b) / cap), equation (110) of the paper, in float32.

    A graph of `torch.compile` has it as the operator `tfla::gate_preactivations`.

    Args:
        x: (..., d_model) in bfloat16.
        weight: (heads, d_model) in bfloat16 or float32.
        bias: (heads,).
        cap: c of equation (110).

    Returns:
        (..., heads).
    """
    compute = _registered if torch.compiler.is_compiling() else _Preactivations.apply
    y: Tensor = compute(x, weight, bias, cap)
    return y


class _Preactivations(torch.autograd.Function):
    """The pre-activations in eager calls, whose backward keeps the inputs and the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
        y = _compute(x, weight, bias, cap)
        ctx.save_for_backward(x, weight, bias, y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            return *recorded_gradients(partial(_plain_preactivations, ctx.cap), (x, weight, bias), dy), None
        return *_gradients(dy, x, weight, bias, y, ctx.cap, ctx.needs_input_grad[:3]), None


@torch.library.custom_op(
    "tfla::gate_preactivations", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias, float cap) -> Tensor"
)
def _registered(x: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    """Compute the pre-activations in a graph."""
    return _compute(x, weight, bias, cap)


@_registered.register_fake
def _registered_shape(x: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    """Return a tensor of the shape of the pre-activations."""
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32)


@torch.library.custom_op(
    "tfla::gate_preactivations_backward", mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor y, float cap, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _registered_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, cap: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients in a graph; those that are not wanted have shape (0,)."""
    dx, dW, db = (dy.new_empty(0) if t is None else t for t in _gradients(dy, x, weight, bias, y, cap, wanted))
    return dx, dW, db


@_registered_gradients.register_fake
def _shapes_of_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, cap: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes of the gradients."""
    dx, dW, db = (
        t.new_empty(t.shape) if want else dy.new_empty(0) for t, want in zip((x, weight, bias), wanted, strict=True)
    )
    return dx, dW, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward in a graph reads."""
    *tensors, ctx.cap = inputs
    ctx.save_for_backward(*tensors, output)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of the operator."""
    wanted = [*ctx.needs_input_grad[:3]]
    found = _registered_gradients(dy, *ctx.saved_tensors, ctx.cap, wanted)
    return *(t if want else None for t, want in zip(found, wanted, strict=True)), None


_registered.register_autograd(_differentiate, setup_context=_save)


def _compute(x: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    """Compute the pre-activations."""
    z = _product(x.reshape(-1, x.shape[-1]), torch.cat(_parts(weight)).mT, torch.float32)  # (1)
    z = z.unflatten(1, (-1, len(weight))).sum(1) + bias.float()
    return soft_cap(z, cap).view(*x.shape[:-1], len(weight))


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, cap: float, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute those gradients of x, weight and bias that are wanted, from the cotangent dy and the pre-activations."""
    dz = (dy * (1 - (y / cap).square())).reshape(-1, len(weight))
    d, W = _parts(dz), _parts(weight)
    dx = dW = db = None
    if wanted[0]:
        pairs = [(i, j) for i in range(len(d)) for j in range(len(W)) if i + j < PARTS]
        left, right = torch.cat([d[i] for i, _ in pairs], 1), torch.cat([W[j] for _, j in pairs])
        dx = _product(left, right, x.dtype).view(x.shape)  # (3)
    if wanted[1]:
        sums = _product(torch.cat(d, 1).mT, x.reshape(-1, x.shape[-1]), torch.float32)  # (2)
        dW = sums.unflatten(0, (len(d), -1)).sum(0).to(weight.dtype)
    if wanted[2]:
        db = dz.sum(0).to(bias.dtype)
    return dx, dW, db


def _plain_preactivations(cap: float, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute :func:`preactivations` by operations that autograd knows."""
    return soft_cap(torch.nn.functional.linear(x.float(), weight.float(), bias.float()), cap)


def _parts(x: Tensor) -> list[Tensor]:
    """Return the bfloat16 tensors whose sum is x: x itself where it is bfloat16, else three."""
    if x.dtype == torch.bfloat16:
        return [x]
    found = [x.bfloat16()]
    for _ in range(PARTS - 1):
        x = x - found[-1]
        found.append(x.bfloat16())
    return found


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of bfloat16 matrices, summed up in float32 and rounded to dtype."""
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a @ b if a.is_cuda else (a.float() @ b.float()).to(dtype)
