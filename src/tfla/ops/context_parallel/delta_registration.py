"""Context parallelism of the delta rule as a node of autograd for eager calls, and as operators for traced ones.

    tfla::context_delta            the forward of one process's part
    tfla::context_delta_backward   its backward

As in :mod:`.registration`, the operators contain their collective, and shapes follow from shapes of the arguments.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
from torch import Tensor

from tfla.backends import DELTA_BACKENDS, DeltaInputs
from tfla.backends.delta import DeltaSpec
from tfla.ops.autocast import without_autocast
from tfla.ops.context_parallel.cuts import Placement
from tfla.ops.context_parallel.delta_operator import Results, Saved, backward, forward
from tfla.ops.context_parallel.delta_states import PER_STEP
from tfla.ops.context_parallel.local import DeltaCall, Shape
from tfla.ops.context_parallel.registration import check_placed, cut_as_traced, distinct
from tfla.ops.context_parallel.transitions import transition_shape
from tfla.ops.schema import argument

NUM_INPUTS = len(DeltaInputs._fields)
NUM_READ = 2  # results that a caller reads: h, and the final states


def _forward(x: DeltaInputs, call: DeltaCall) -> Results:
    """Compute the forward; the backend must not read the offsets of whole sequences."""
    with without_autocast(x.q.device.type):
        return forward(x._replace(cu_seqlens=None), call)


def _backward(
    x: DeltaInputs, h: Tensor, saved: Saved, dh: Tensor | None, dC: Tensor | None, call: DeltaCall
) -> list[Tensor | None]:
    """Compute the gradients of the inputs but the offsets, in the dtypes of the inputs."""
    dh = torch.zeros_like(h) if dh is None else dh
    with without_autocast(x.q.device.type):
        found = backward(x._replace(cu_seqlens=None), saved, dh, dC, call)
    return [None if t is None or g is None else g.to(t.dtype) for t, g in zip(x[:-1], found, strict=True)]


class _Node(torch.autograd.Function):
    """The node of autograd of an eager call."""

    @staticmethod
    def forward(ctx: Any, call: DeltaCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        found = _forward(DeltaInputs(*tensors), call)  # type: ignore[arg-type]
        ctx.save_for_backward(*tensors, found.h, *found.saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return found.h, found.C

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dC: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("context_parallel: the gradient has no derivative, got create_graph=True")
        kept = ctx.saved_tensors  # once: activation checkpointing recomputes them at each access
        x, h, saved = DeltaInputs(*kept[:NUM_INPUTS]), kept[NUM_INPUTS], Saved(*kept[NUM_INPUTS + 1 :])
        return None, *_backward(x, h, saved, dh, dC, ctx.call), None


def delta_eagerly(x: DeltaInputs, call: DeltaCall) -> tuple[Tensor, ...]:
    """Return h and the final states of an eager call."""
    if call.spec.save:
        return _Node.apply(call, *x)
    found = _forward(x, call)
    return found.h, found.C


# The registered operators. Their arguments are the inputs, what a backward reads besides, and the options.

_INPUTS = ", ".join(argument(name, kind, {}) for name, kind in typing.get_type_hints(DeltaInputs).items())
_PLACED = "str backend, int rank, int size, str order, SymInt[] lengths, str group, SymInt writes"
_OPTIONS = ", ".join(
    [_PLACED, *(argument(name, kind, {}) for name, kind in typing.get_type_hints(DeltaSpec).items())]
)  # fmt: skip
_SAVED = ", ".join(f"Tensor saved_{name}" for name in Saved._fields)
NUM_PLACED = _PLACED.count(",") + 1
NUM_RESULTS = NUM_READ + len(Saved._fields)


def _call(x: DeltaInputs, options: tuple[Any, ...], read: bool) -> DeltaCall:
    """Return the call of a list of options; ``read``: whether the offsets have values that can be read."""
    backend, rank, size, order, lengths, group, _ = options[:NUM_PLACED]
    placement = Placement(rank, size, order, tuple(lengths))
    cut, fragments = cut_as_traced(placement, x.q.shape[1], x.cu_seqlens, read)
    return DeltaCall(cut, placement, group, backend, DeltaSpec(*options[NUM_PLACED:]), fragments)


for _name, _further, _results in (
    ("context_delta", "", NUM_RESULTS),
    ("context_delta_backward", f"Tensor h, {_SAVED}, Tensor? dh, Tensor? dC, ", NUM_INPUTS - 1),
):
    torch.library.define(
        f"tfla::{_name}", f"({_INPUTS}, {_further}{_OPTIONS}) -> ({', '.join(['Tensor'] * _results)})",
        tags=(torch.Tag.pt2_compliant_tag,),
    )  # fmt: skip


@torch.library.impl("tfla::context_delta", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    x = DeltaInputs(*args[:NUM_INPUTS])
    *placed, writes = args[NUM_INPUTS : NUM_INPUTS + NUM_PLACED]
    check_placed(x, tuple(placed), writes)
    found = _forward(x, _call(x, args[NUM_INPUTS:], read=True))
    return distinct((found.h, found.C, *found.saved), x.q.new_empty(0, dtype=x.acc_dtype))


@torch.library.register_fake("tfla::context_delta")
def _(*args: Any) -> tuple[Tensor, ...]:
    x = DeltaInputs(*args[:NUM_INPUTS])
    return _shapes(x, _call(x, args[NUM_INPUTS:], read=False))


def _shapes(x: DeltaInputs, call: DeltaCall) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of the results of a forward."""
    spec, (B, _, H, V), K = call.spec, x.v.shape, x.q.shape[3]
    shape = Shape.of_cut(call.cut, B, call.fragments)
    offsets = None if shape.offsets is None else x.q.new_empty(len(shape.offsets), dtype=torch.int32)
    of_steps = (None if t is None else shape.view(t) for t in x[:PER_STEP])
    local = DeltaInputs(*of_steps, x.A_log, x.dt_bias, None, offsets)  # type: ignore[arg-type,call-arg]
    transition = B, H, *transition_shape(K, spec.correct)

    def new(wanted: bool, *sizes: int, dtype: torch.dtype = x.acc_dtype) -> Tensor:
        return x.q.new_empty(sizes if wanted else (0,), dtype=dtype)

    stored = DELTA_BACKENDS[call.backend].saved(local, spec.correct, spec.chunk_size, spec.kernel)
    return (
        x.v.new_empty(x.v.shape),
        new(spec.final_state, x.sequences, H, K, V),
        *(new(spec.save, *sizes, dtype=dtype) for sizes, dtype in stored),
        new(True, call.placement.spans_here, B, H, K, V),
        new(spec.save, call.placement.spans, *transition),
        new(spec.final_state, x.sequences // B, *transition),
    )


@torch.library.impl("tfla::context_delta_backward", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    x, h, rest = DeltaInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS], args[NUM_INPUTS + 1 :]
    stored = len(Saved._fields)
    saved, (dh, dC), options = Saved(*rest[:stored]), rest[stored : stored + 2], rest[stored + 2 :]
    return distinct(tuple(_backward(x, h, saved, dh, dC, _call(x, options, read=True))), saved.C)


@torch.library.register_fake("tfla::context_delta_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    like = args[NUM_INPUTS]
    return tuple(like.new_empty(0) if t is None else t.new_empty(t.shape) for t in args[: NUM_INPUTS - 1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:NUM_INPUTS], output[0], *output[NUM_READ:])
    ctx.options = inputs[NUM_INPUTS:]
    ctx.set_materialize_grads(False)


def _traced_backward(ctx: Any, dh: Tensor | None, dC: Tensor | None, *_: Tensor | None) -> Any:
    tensors = ctx.saved_tensors
    found = torch.ops.tfla.context_delta_backward(*tensors, dh, dC, *ctx.options)
    grads = [None if t is None else g for t, g in zip(tensors[: NUM_INPUTS - 1], found, strict=True)]
    return *grads, None, *[None] * len(ctx.options)


torch.library.register_autograd("tfla::context_delta", _traced_backward, setup_context=_setup_context)


def delta_traced(
    x: DeltaInputs, spec: DeltaSpec, backend: str, placement: Placement, group: str, writes: int = 1
) -> tuple[Tensor, ...]:
    """Return h and the final states of a call that PyTorch's dispatcher has to see; ``writes`` are those of a step."""
    found: tuple[Tensor, ...] = torch.ops.tfla.context_delta(*x, backend, *placement, group, writes, *spec)
    return found[:NUM_READ]
