"""The states that processes exchange in a forward: those of their spans by themselves, and what follows from all."""

from __future__ import annotations

from torch import Tensor

from tfla.backends import Inputs
from tfla.ops.context_parallel import own_states
from tfla.ops.context_parallel.cuts import End, Fragment
from tfla.ops.context_parallel.local import Call, Gated, of_sequences
from tfla.ops.context_parallel.spans import Span, compose, concatenate, row_width, stack, to_rows


def _own_state(x: Inputs, gates: Gated, f: Fragment, normalize: bool) -> Span:
    """Return the action of a fragment; it contains the initial state where the sequence begins."""
    steps, start = slice(f.start, f.stop), None
    if f.begins and x.C is not None:
        dtype = x.acc_dtype
        C, n, m = (of_sequences(t, x.q.shape[0]) for t in (x.C, x.n, x.m))
        parts = (None if t is None else t[:, f.sequence].to(dtype) for t in (C, n, m))
        start = own_states.Start(*parts)  # type: ignore[arg-type]
    log_i, log_f = gates.at(steps)
    return own_states.own_state(x.k[:, steps], x.v[:, steps], log_i, log_f, normalize, start, f.begins)


def state_rows(x: Inputs, call: Call) -> Tensor:
    """Return the rows that this process gives to the others, (S + additional rows, B, H, width).

    They are those of the last fragments of its spans. With `final_state` those of the other fragments that end follow.
    """
    B, H, K, V = x.q.shape[0], x.v.shape[2], x.q.shape[3], x.v.shape[3]
    spec, cut = call.spec, call.cut
    width = row_width(K, V, spec.normalize)
    rows = x.q.new_zeros(cut.rows(spec.final_state), B, H, width, dtype=x.acc_dtype)
    gates: Gated | None = None
    for row, f in cut.sent(spec.final_state).items():
        gates = Gated.of(x, spec) if gates is None else gates
        own = _own_state(x, gates, f, spec.normalize)
        rows[row] = to_rows(own.C, own.n, own.m, own.log_decay)
    return rows


def final_states(call: Call, of_spans: Span, of_ranks: Span) -> Span:
    """Return the final states of all sequences, (D, B, H, ...), and the log-decays of the fragments that end."""

    def end_row(end: End) -> Span:
        if end.row is None:
            return of_spans.at(end.position)
        return of_ranks_row(end)

    def of_ranks_row(end: End) -> Span:
        rank, _ = call.placement.owner(end.position)
        assert end.row is not None
        return of_ranks.at(rank).at(call.placement.spans_here + end.row)

    found = []
    for end in call.cut.ends:
        last = end_row(end)
        if end.source < end.position:
            whole = compose(concatenate([of_spans.at(slice(end.source, end.position)), stack([last])]))
            last = whole._replace(log_decay=last.log_decay)
        found.append(last)
    return stack(found)
