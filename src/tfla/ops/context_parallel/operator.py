"""The operator on one process's part of the sequence: forward and backward.

    forward                                               backward
    1. each span's own state, from its steps alone        each span's own cotangent of the state before it
    2. all_gather                                         all_gather
    3. the states before this process's spans             the cotangents of the states after this process's spans
    4. the backend's forward from these states            the backend's backward from these cotangents

Steps 1 to 3 are those by which one GPU cuts a long sequence into segments (docs/mathematics.md). A backend that does so
shares its pass over segments with step 1 (:mod:`.segments`). Dimensions are named as in :mod:`.local`.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends import BACKENDS, Backend, Inputs
from tfla.backends.base import Grads, Outputs
from tfla.ops.context_parallel import exchange
from tfla.ops.context_parallel.cotangents import cotangent_rows, ends_of, own_cotangents, received
from tfla.ops.context_parallel.local import Call, Results, Saved, Shape, initial_gradient, local_inputs, starts_of
from tfla.ops.context_parallel.segments import SegmentExchange, give_max_states, read_by_backward
from tfla.ops.context_parallel.spans import Cotangent, Span, compose, from_rows, stack
from tfla.ops.context_parallel.states import final_states, state_rows


def _is_dense(call: Call) -> bool:
    """Return whether sequences are rows of a batch, or a single packed one: the same on every process."""
    return len(call.cut.ends) == 1 and call.fragments is None


def forward(x: Inputs, call: Call) -> Results:
    """Compute the forward of this process's part, in the steps of the module's docstring.

    Args:
        x: the inputs, (B, T, ...) of this process's steps; the states are those of whole sequences, (B D, ...).
        call: the call.
    """
    spec, backend, shape = call.spec, BACKENDS[call.backend], Shape.of(call, x.q.shape[0])
    (B, _, H, V), K = x.v.shape, x.q.shape[3]
    if backend.exchanges and _is_dense(call):
        if shape.offsets is None and backend.has_segments(local_inputs(x, shape, None, None, None), spec):
            return _forward_with_segments(x, call, shape, backend)
        if spec.normalize:
            give_max_states(x, call)
    # 1. and 2. The rows of all processes: by rank (R, rows, B, H, ...), and one for each span in the order of time.
    of_ranks = from_rows(exchange.gather(state_rows(x, call), call.group, call.placement.size), K, V)
    of_spans = exchange.in_order_of_time(of_ranks, call.placement)
    # 3. The state before each span of this process, where its first sequence does not begin with it.
    carried = []
    for span in call.cut.spans:
        if span.source is not None:
            carried.append(compose(of_spans.at(slice(span.source, span.position))))
        else:
            zero = x.q.new_zeros(B, H, K, V, dtype=x.acc_dtype)
            n, m = (zero[..., 0], zero[..., 0, 0]) if spec.normalize else (None, None)
            carried.append(Span(of_spans.log_decay[0], zero, n, m))
    saved = _saved(stack(carried), of_spans)
    # 4. The backward stabilizes the cotangents of later spans with the max states after fragments: the backend returns
    # these as max states of its final states.
    with_last_m = spec.normalize and spec.save
    local = local_inputs(x, shape, *starts_of(x, call, shape, saved))
    out = backend.forward(local, spec._replace(final_state=with_last_m))
    return _results(x, call, shape, out, saved, of_spans, of_ranks)


def _saved(before: Span, of_spans: Span) -> Saved:
    """Return what the backward needs from the states before this process's spans, (S, B, ...), and from all spans."""
    none = before.C.new_empty(0)
    n, m = (none if t is None else t for t in before[2:])
    return Saved(
        d=none, chunk_C=none, chunk_n=none, C=before.C, n=n, m=m, last_m=none,
        log_decay=of_spans.log_decay.contiguous(), end_log_decay=none,
    )  # fmt: skip


def _results(
    x: Inputs, call: Call, shape: Shape, out: Outputs, saved: Saved, of_spans: Span, of_ranks: Span
) -> Results:
    """Return the results of a forward from those of the backend and the rows of all processes."""
    spec, none = call.spec, out.h.new_empty(0, dtype=x.acc_dtype)
    saved = saved._replace(d=out.d, chunk_C=out.chunk_C, chunk_n=out.chunk_n)
    if spec.normalize and spec.save:
        saved = saved._replace(last_m=out.m.unflatten(0, (x.q.shape[0], -1)))
    h = shape.back(out.h)
    if not spec.final_state:
        return Results(h, none, none, none, saved)
    final = final_states(call, of_spans, of_ranks)
    C, n, m = (none if t is None else t.transpose(0, 1).flatten(0, 1) for t in final[1:])
    return Results(h, C, n, m, saved._replace(end_log_decay=final.log_decay))


def _forward_with_segments(x: Inputs, call: Call, shape: Shape, backend: Backend) -> Results:
    """Compute the forward with the exchange between the passes of the backend."""
    (B, _, H, V), K, spec, spans = x.v.shape, x.q.shape[3], call.spec, len(call.cut.spans)
    given: list[Tensor | None] = [None, None, None]
    if x.C is not None:  # only where sequences begin; the others get their states from the exchange
        zero = x.q.new_zeros(spans, B, H, K, V, dtype=x.acc_dtype)
        n, m = (zero[..., 0], zero[..., 0, 0]) if spec.normalize else (None, None)
        before = Span(zero, zero, n, m)
        given = starts_of(x, call, shape, _saved(before, before))
    # The cotangents of later spans are stabilized with the max states that the backend computes.
    local_spec = spec._replace(final_state=spec.normalize)
    out, found = backend.forward_exchanging(local_inputs(x, shape, *given), local_spec, SegmentExchange.of(call))
    none = found.C.new_empty(0)
    n, m, last_m = (
        (_by_span(found.n, B), _by_span(found.m, B), out.m.unflatten(0, (B, -1))) if spec.normalize else (none,) * 3
    )
    saved = Saved(
        d=out.d, chunk_C=out.chunk_C, chunk_n=out.chunk_n, C=_by_span(found.C, B), n=n, m=m,
        last_m=last_m if spec.save else none, log_decay=found.log_decays,
        end_log_decay=found.log_decays[-1:] if spec.final_state else none,
    )  # fmt: skip
    return Results(shape.back(out.h), found.final_C, found.final_n, found.final_m, saved)


def _by_span(x: Tensor, batch: int) -> Tensor:
    """Return the states of spans, (B S, ...), as (S, B, ...)."""
    return x.unflatten(0, (batch, -1)).transpose(0, 1)


def backward(
    x: Inputs, h: Tensor, m: Tensor, saved: Saved, dh: Tensor, dC: Tensor | None, dn: Tensor | None, call: Call
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, log_i, log_f and of the initial C, n, m; None for an input that is None.

    Args:
        x, call: those of the forward.
        h, m, saved: its results; m is that of the final states.
        dh: (B, T, H, dhv).
        dC, dn: (B D, ...), this process's cotangents of the final states; None is zero. Those of all processes are
            added up.
    """
    spec, size, shape, backend = call.spec, call.placement.size, Shape.of(call, x.q.shape[0]), BACKENDS[call.backend]
    local = local_inputs(x, shape, *starts_of(x, call, shape, saved))
    none = saved.d.new_empty(0)
    out = Outputs(
        h=shape.view(h), C=none, n=none, m=none, d=saved.d, chunk_C=saved.chunk_C, chunk_n=saved.chunk_n
    )  # fmt: skip
    no_final = spec._replace(final_state=False)
    if backend.exchanges and _is_dense(call) and shape.offsets is None and backend.has_segments(local, spec):
        read = read_by_backward(saved, m, dC, dn)
        grads = backend.backward_exchanging(local, out, shape.view(dh), read, no_final, SegmentExchange.of(call))
        return _of_inputs(x, grads, shape, call, None)
    # 1. and 2. The cotangents of the states before spans, and of the final states, from all processes.
    like = saved.C[0]
    rows = cotangent_rows(own_cotangents(x, h, saved, dh, call), m, dC, dn, call, like)
    # Processes with segments exchange dC before they have dn, and all others do as they do.
    if backend.exchanges and _is_dense(call):
        gathered = [exchange.gather(each, call.group, size) for each in rows]
    else:
        gathered = exchange.gather_together(rows, call.group, size)
    of_spans, of_final = received(gathered, m, call, like)
    # 3. and 4.
    ends = ends_of(call, saved.log_decay, saved.end_log_decay, saved.last_m, of_spans, of_final, shape)
    grads = backend.backward(local, out, shape.view(dh), *ends, no_final)
    return _of_inputs(x, grads, shape, call, of_final)


def _of_inputs(
    x: Inputs, grads: Grads, shape: Shape, call: Call, of_final: Cotangent | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments from those of the backend."""
    found = [None if t is None else shape.back(g).to(t.dtype) for t, g in zip(x[:5], grads[:5], strict=True)]
    if x.C is None:
        return (*found, None, None, None)
    of_C, of_n = (None, None) if of_final is None else of_final[:2]
    dC = initial_gradient(x.C, grads.C, of_C, call.cut, shape)
    dn = initial_gradient(x.n, grads.n, of_n, call.cut, shape)
    assert dC is not None
    dm = None
    if x.n is not None and x.m is not None and dn is not None:  # the true initial state is exp(m) C, exp(m) n
        dm = ((x.C * dC).sum((-2, -1)) + (x.n * dn).sum(-1)).to(x.m.dtype)
    return (*found, dC.to(x.C.dtype), dn if dn is None or x.n is None else dn.to(x.n.dtype), dm)
