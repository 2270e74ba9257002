"""The delta rule on one process's part of the sequence, in the steps of :mod:`.operator`: forward and backward.

What a span does to the state is a matrix and a state for each head (:mod:`.transitions`). The backward exchanges the
cotangents that the outputs of each span send to the state before it, and has the transitions from the forward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tfla.backends import DELTA_BACKENDS, DeltaInputs
from tfla.backends.delta import DeltaOutputs
from tfla.ops.context_parallel import exchange
from tfla.ops.context_parallel.delta_states import PER_STEP, action_rows, carried_state, final_states
from tfla.ops.context_parallel.local import (
    DeltaCall,
    Shape,
    before_fragments,
    initial_gradient,
    on_device,
)
from tfla.ops.context_parallel.transitions import Action, apply_back, from_rows


class Saved(NamedTuple):
    """The tensors that the backward needs besides inputs; parts that do not exist have shape (0,)."""

    E: Tensor  # prediction errors, corrections and states at chunk starts, as the backend leaves them
    X: Tensor
    chunk_C: Tensor
    C: Tensor  # (S, B, H, dqk, dhv), the states before this process's spans; zero where a sequence begins
    A: Tensor  # (all spans, B, H, ...), the transitions of the last fragment of each span
    end_A: Tensor  # (D, B, H, ...), those of the fragments that end; with `final_state`


class Results(NamedTuple):
    """The results of a forward."""

    h: Tensor  # (B, T, H, dhv)
    C: Tensor  # (B D, H, dqk, dhv), final states of all sequences; shape (0,) without `final_state`
    saved: Saved


def local_inputs(x: DeltaInputs, call: DeltaCall, shape: Shape, carried: Tensor) -> DeltaInputs:
    """Return the inputs of the backend, whose states are those before the fragments of this process, (B F, ...)."""
    C = None
    if x.C is not None or any(span.source is not None for span in call.cut.spans):
        C = before_fragments(x.C, carried, call.cut, shape)
    of_steps = (None if t is None else shape.view(t) for t in x[:PER_STEP])
    offsets = None if shape.offsets is None else on_device(x.q.device, shape.offsets)
    return DeltaInputs(*of_steps, x.A_log, x.dt_bias, C, offsets)  # type: ignore[arg-type,call-arg]


def forward(x: DeltaInputs, call: DeltaCall) -> Results:
    """Compute the forward of this process's part; the state of ``x``, (B D, ...), is that of whole sequences."""
    spec, placement, cut = call.spec, call.placement, call.cut
    (B, _, H, V), K = x.v.shape, x.q.shape[3]
    shape = Shape.of_cut(cut, B, call.fragments)
    # 1. and 2. The actions of spans: by rank (R, rows, B, H, ...), and one for each span in the order of time.
    of_ranks = from_rows(exchange.gather(action_rows(x, call), call.group, placement.size), K, V, spec.correct)
    of_spans = Action(*(exchange.ordered(t, placement) for t in of_ranks))
    # 3. The states before this process's spans, (S, B, H, dqk, dhv).
    none = x.q.new_empty(0, dtype=x.acc_dtype)
    carried = x.q.new_zeros(len(cut.spans), B, H, K, V, dtype=x.acc_dtype)
    for s, span in enumerate(cut.spans):
        if span.source is not None:
            carried[s] = carried_state(of_spans, span.source, span.position, spec.correct)
    # 4. The backend's forward, whose final states nothing reads.
    local = local_inputs(x, call, shape, carried)
    out = DELTA_BACKENDS[call.backend].forward(local, spec._replace(final_state=False))
    final, end_A = none, none
    if spec.final_state:
        end_A, states = final_states(cut, placement, of_spans, of_ranks, spec.correct)
        final = states.transpose(0, 1).flatten(0, 1)
    A = of_spans.A.clone() if spec.save else none  # a view would keep all rows
    return Results(shape.back(out.h), final, Saved(out.E, out.X, out.chunk_C, carried, A, end_A))


def _cotangent_rows(own: Tensor | None, dC: Tensor | None, call: DeltaCall, shape: Shape, like: Tensor) -> Tensor:
    """Return the rows that this process gives to the others, (S + D, B, H, dqk, dhv), or (S, ...) without final states.

    Args:
        own: (B F, ...), the cotangents of the states before its fragments from their outputs; None: no process needs
            them.
        dC: (B D, ...), this process's cotangents of the final states; None is zero.
        call: the call.
        shape: the form in which the backend gets the fragments.
        like: (B, H, dqk, dhv), a tensor of the dtype of states.
    """
    spans, final = call.cut.spans, len(call.cut.ends) if call.spec.final_state else 0
    rows = like.new_zeros(len(spans) + final, *like.shape)
    first = 0
    for s, span in enumerate(spans):
        if own is not None and span.source is not None:
            rows[s] = own.unflatten(0, (shape.batch, -1))[:, first]
        first += len(span.fragments)
    if final and dC is not None:
        rows[len(spans) :] = dC.unflatten(0, (shape.batch, -1)).transpose(0, 1)
    return rows


def _cotangents_after(
    of_spans: Tensor, of_final: Tensor | None, saved: Saved, call: DeltaCall, shape: Shape
) -> Tensor | None:
    """Return the cotangents of the states after the fragments of this process, (B F, ...), or None where all are zero.

    Args:
        of_spans: (all spans, B, ...), the cotangents of the states before spans from the spans' own outputs.
        of_final: (D, B, ...), those of the final states, or None.
        saved, call, shape: of the forward, and the form in which the backend gets the fragments.
    """
    rows: list[Tensor | None] = []
    correct = call.spec.correct
    for span in call.cut.spans:
        for f in span.fragments:
            dC = None if of_final is None else of_final[f.sequence]
            if not f.ends:
                position = call.cut.ends[f.sequence].position
                own = of_spans[position]
                dC = own if dC is None else own + apply_back(saved.end_A[f.sequence], dC, correct)
                for p in range(position - 1, span.position, -1):
                    dC = of_spans[p] + apply_back(saved.A[p], dC, correct)
            rows.append(dC)
    return shape.joined(rows)


def backward(x: DeltaInputs, saved: Saved, dh: Tensor, dC: Tensor | None, call: DeltaCall) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the inputs but the offsets; None for an input that is None.

    Args:
        x, call: those of the forward.
        saved: its results.
        dh: (B, T, H, dhv).
        dC: (B D, ...), this process's cotangents of the final states; None is zero. Those of all processes are added.
    """
    cut, placement, size, backend = call.cut, call.placement, call.placement.size, DELTA_BACKENDS[call.backend]
    shape, spec = Shape.of_cut(cut, x.q.shape[0], call.fragments), call.spec._replace(final_state=False)
    local, none = local_inputs(x, call, shape, saved.C), saved.C.new_empty(0)
    out = DeltaOutputs(h=none, C=none, E=saved.E, X=saved.X, chunk_C=saved.chunk_C)
    do = shape.view(dh)
    # 1. and 2. The cotangents of the states before spans, and of the final states, from all processes.
    own = None
    if any(span.source is not None for span in cut.spans):
        own = backend.initial_cotangent(local, out, do, spec)
    rows = _cotangent_rows(own, dC, call, shape, saved.C[0])
    gathered = exchange.gather(rows, call.group, size)
    of_spans = exchange.ordered(gathered, placement)
    of_final = gathered[:, len(cut.spans) :].sum(0) if call.spec.final_state else None
    # 3. and 4.
    grads = backend.backward(local, out, do, _cotangents_after(of_spans, of_final, saved, call, shape), spec)
    found = [None if t is None or g is None else shape.back(g) for t, g in zip(x[:PER_STEP], grads, strict=False)]
    first = None if grads.C is None else initial_gradient(x.C, grads.C, of_final, cut, shape)
    return *found, grads.A_log, grads.dt_bias, first
