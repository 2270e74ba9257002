"""Context parallelism as a node of autograd for eager calls, and as operators of PyTorch for traced ones.

    tfla::context_attend            the forward of one process's part
    tfla::context_attend_backward   its backward

The operators contain their collective. Shapes of their results follow from shapes of the arguments: with packed
sequences the backend gets as many fragments as there can be, of which some have no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, DeltaInputs, Inputs
from tfla.backends.base import Spec
from tfla.ops.context_parallel.cuts import CONTIGUOUS, Cut, Placement, cut_dense, cut_packed
from tfla.ops.context_parallel.operator import Call, Saved, Shape, backward, forward
from tfla.ops.context_parallel.parts import check_parts

NUM_INPUTS, NUM_SAVED = len(Inputs._fields), len(Saved._fields)


def cut_of(placement: Placement, T: int, cu_seqlens: Tensor | None) -> Cut:
    """Return the part of this process; offsets are read on the host."""
    return cut_dense(placement, T) if cu_seqlens is None else cut_packed(placement, T, tuple(cu_seqlens.tolist()))


def cut_if_it_fits(placement: Placement, T: int, cu_seqlens: Tensor | None) -> Cut | None:
    """Return the result of :func:`cut_of`, or None where it raises: first all processes compare their parts."""
    try:
        return cut_of(placement, T, cu_seqlens)
    except ValueError:
        return None


def _without_offsets(tensors: Sequence[Any]) -> Inputs:
    """Return the inputs without the offsets of whole sequences, which the backend must not read."""
    return Inputs(*tensors[: NUM_INPUTS - 1], None)  # type: ignore[call-arg]


class _Node(torch.autograd.Function):
    """The node of autograd of an eager call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        found = forward(_without_offsets(tensors), call)
        ctx.save_for_backward(*tensors[: NUM_INPUTS - 1], found.h, found.m, *found.saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.m)
        return found[:4]

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None, _: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("context_parallel: the gradient has no derivative, got create_graph=True")
        kept = ctx.saved_tensors  # once: activation checkpointing recomputes them at each access
        *tensors, h, m = kept[: NUM_INPUTS + 1]
        saved = Saved(*kept[NUM_INPUTS + 1 :])
        dh = torch.zeros_like(h) if dh is None else dh
        return None, *backward(_without_offsets(tensors), h, m, saved, dh, dC, dn, ctx.call), None


def attend_eagerly(x: Inputs, call: Call) -> tuple[Tensor, ...]:
    """Return h and the final C, n, m of an eager call."""
    return _Node.apply(call, *x) if call.spec.save else forward(_without_offsets(x), call)[:4]


# The registered operators. Their arguments are the inputs, what a backward reads besides, the options, the backend,
# the placement and the name of the group.

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_i, Tensor log_f, Tensor? C, Tensor? n, Tensor? m, Tensor? cu_seqlens"
)
_OPTIONS = (
    "float scale, bool normalize, bool normalizer_grad, SymInt chunk_size, str kernel, bool save, bool final_state, "
    "ScalarType? store_dtype, str gates, str backend, int rank, int size, str order, SymInt[] lengths, str group"
)
_SAVED = ", ".join(f"Tensor saved_{name}" for name in Saved._fields)
_COTANGENTS = "Tensor h, Tensor final_m, {}, Tensor dh, Tensor? dC, Tensor? dn"
NUM_SPEC = len(Spec._fields)


def pack(x: Inputs, call_spec: Spec, backend: str, placement: Placement, group: str) -> tuple[Any, ...]:
    """Return the arguments of tfla::context_attend."""
    return (*x, *call_spec, backend, *placement, group)


def cut_as_traced(placement: Placement, T: int, cu_seqlens: Tensor | None, read: bool) -> tuple[Cut, int | None]:
    """Return the part of this process, and the number of fragments of packed sequences, which is that of any offsets.

    Args:
        placement: the order of spans.
        T: the steps of this process.
        cu_seqlens: the offsets of packed sequences.
        read: whether the offsets have values that can be read; if not, the part has one fragment in each span, and T
            need not fit the order and the lengths: the call raises on every process when it runs.
    """
    fragments = None if cu_seqlens is None else cu_seqlens.shape[0] - 2 + placement.spans_here
    if read:
        return cut_of(placement, T, cu_seqlens), fragments
    try:
        return cut_dense(placement, T), fragments
    except ValueError:  # a process that raised here alone would leave the others waiting
        return cut_dense(Placement(placement.rank, placement.size, CONTIGUOUS, ()), T), fragments


def _call(x: Inputs, options: tuple[Any, ...], read: bool) -> Call:
    """Return the call of a list of options; ``read``: whether the offsets have values that can be read."""
    spec, (backend, rank, size, order, lengths, group) = Spec(*options[:NUM_SPEC]), options[NUM_SPEC:]
    placement = Placement(rank, size, order, tuple(lengths))
    cut, fragments = cut_as_traced(placement, x.q.shape[1], x.cu_seqlens, read)
    return Call(cut, placement, group, backend, spec, fragments)


def check_placed(x: Inputs | DeltaInputs, placed: tuple[Any, ...], writes: int = 1) -> None:
    """Check the parts of a traced call when it runs, from the options that say where it runs.

    Args:
        x: the inputs.
        placed: the options; their lengths count writes.
        writes: how many steps of x are one step for the caller.
    """
    _, rank, size, order, lengths, group = placed
    of_steps = Placement(rank, size, order, tuple(n // writes for n in lengths))
    check_parts(of_steps, group, x.q, x.cu_seqlens, writes=writes)
    of_steps.own_lengths(x.q.shape[1] // writes)


def distinct(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of which no two are the same and none is a view or None, as PyTorch asks of an operator."""
    found: list[Tensor] = []
    for t in tensors:
        if t is None or not t.numel():
            found.append(like.new_empty((0,) if t is None else t.shape, dtype=like.dtype if t is None else t.dtype))
        else:
            found.append(t.clone() if t._is_view() or any(t is each for each in found) else t)
    return tuple(found)


torch.library.define(
    "tfla::context_attend",
    f"({_INPUTS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (4 + NUM_SAVED))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "tfla::context_attend_backward",
    f"({_INPUTS}, {_COTANGENTS.format(_SAVED)}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (NUM_INPUTS - 1))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("tfla::context_attend", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    x = Inputs(*args[:NUM_INPUTS])
    check_placed(x, args[NUM_INPUTS + NUM_SPEC :])
    found = forward(_without_offsets(x), _call(x, args[NUM_INPUTS:], read=True))
    return distinct((*found[:4], *found.saved), x.q.new_empty(0, dtype=x.acc_dtype))


@torch.library.register_fake("tfla::context_attend")
def _(*args: Any) -> tuple[Tensor, ...]:
    x = Inputs(*args[:NUM_INPUTS])
    return _shapes(x, _call(x, args[NUM_INPUTS:], read=False))


def _shapes(x: Inputs, call: Call) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of the results of a forward."""
    spec, (B, _, H, V), K = call.spec, x.v.shape, x.q.shape[3]
    sequences = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    shape = Shape.of(call, B)
    offsets = None if shape.offsets is None else x.q.new_empty(len(shape.offsets), dtype=torch.int32)
    q, k, v, log_i, log_f = (None if t is None else shape.view(t) for t in x[:5])
    local = Inputs(q, k, v, log_i, log_f, None, None, None, offsets)  # type: ignore[arg-type]
    rows = BACKENDS[call.backend].stored_states(local, spec.chunk_size, spec.kernel) if spec.save else 0
    spans, every = call.placement.spans_here, call.placement.spans
    normalize, final, save = spec.normalize, spec.final_state, spec.save

    def new(wanted: bool, *sizes: int, dtype: torch.dtype = x.acc_dtype) -> Tensor:
        return x.q.new_empty(sizes if wanted else (0,), dtype=dtype)

    saved = Saved(
        d=new(save and normalize, *local.v.shape[:3]),
        chunk_C=new(save, rows, H, K, V, dtype=spec.store_dtype or x.acc_dtype),
        chunk_n=new(save and normalize, rows, H, K),
        C=new(True, spans, B, H, K, V),
        n=new(normalize, spans, B, H, K),
        m=new(normalize, spans, B, H),
        last_m=new(save and normalize, B, shape.fragments, H),
        log_decay=new(True, every, B, H, dtype=torch.float64),
        end_log_decay=new(final, sequences // B, B, H, dtype=torch.float64),
    )
    return (
        x.v.new_empty(x.v.shape),
        new(final, sequences, H, K, V),
        new(final and normalize, sequences, H, K),
        new(final and normalize, sequences, H),
        *saved,
    )


_BACKWARD_TENSORS = NUM_INPUTS + 2 + NUM_SAVED + 3


@torch.library.impl("tfla::context_attend_backward", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    x, rest = Inputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:_BACKWARD_TENSORS]
    h, m, saved, (dh, dC, dn) = rest[0], rest[1], Saved(*rest[2:-3]), rest[-3:]
    call = _call(x, args[_BACKWARD_TENSORS:], read=True)
    return distinct(backward(_without_offsets(x), h, m, saved, dh, dC, dn, call), saved.C)


@torch.library.register_fake("tfla::context_attend_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    like = args[NUM_INPUTS + 2 + Saved._fields.index("C")]
    return tuple(
        like.new_empty(0) if t is None else t.new_empty(t.shape, dtype=t.dtype) for t in args[: NUM_INPUTS - 1]
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:NUM_INPUTS], output[0], output[3], *output[4:])
    ctx.options = inputs[NUM_INPUTS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None, *_: Tensor | None) -> Any:
    tensors, h = ctx.saved_tensors, ctx.saved_tensors[NUM_INPUTS]
    dh = torch.zeros_like(h) if dh is None else dh
    found = torch.ops.tfla.context_attend_backward(*tensors, dh, dC, dn, *ctx.options)
    grads = [None if t is None else g for t, g in zip(tensors[: NUM_INPUTS - 1], found, strict=True)]
    return *grads, None, *[None] * len(ctx.options)


torch.library.register_autograd("tfla::context_attend", _backward, setup_context=_setup_context)


def attend_traced(x: Inputs, spec: Spec, backend: str, placement: Placement, group: str) -> tuple[Tensor, ...]:
    """Return h and the final C, n, m of a call that PyTorch's dispatcher has to see."""
    return torch.ops.tfla.context_attend(*pack(x, spec, backend, placement, group))[:4]
