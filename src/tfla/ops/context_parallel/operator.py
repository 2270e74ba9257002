"""The operator on one process's part of the sequence: forward and backward.

    forward                                               backward
    1. each span's own state, from its steps alone        each span's own cotangent of the state before it
    2. all_gather                                         all_gather
    3. the states before this process's spans             the cotangents of the states after this process's spans
    4. the backend's forward from these states            the backend's backward from these cotangents

Steps 1 to 3 are those by which one GPU cuts a long sequence into segments (docs/mathematics.md). Names of dimensions:
B rows of the batch, F fragments (:mod:`.cuts`) and S spans of this process, D packed sequences (1 in a dense batch).
States of the batch or of packed sequences are (B D, ...).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Grads, Outputs, Spec
from tfla.ops.context_parallel import exchange, own_states
from tfla.ops.context_parallel.cuts import Cut, End, Fragment, Placement
from tfla.ops.context_parallel.spans import (
    Cotangent,
    Span,
    carry_back,
    compose,
    concatenate,
    exclusive_sums,
    from_rows,
    row_width,
    stack,
    to_rows,
)
from tfla.ops.gates import clamp, log_gates


class Call(NamedTuple):
    """The options of a forward and its backward, and this process's part of the sequences."""

    cut: Cut
    placement: Placement
    group: str  # the name of the process group
    backend: str
    spec: Spec  # `final_state`: of the whole sequences
    fragments: int | None  # F of packed tensors, the missing ones without a step; None: as many as there are


class Saved(NamedTuple):
    """The tensors that the backward needs besides inputs and outputs; parts that do not exist have shape (0,)."""

    d: Tensor  # denominators and states at chunk starts, as the backend leaves them
    chunk_C: Tensor
    chunk_n: Tensor
    C: Tensor  # (S, B, H, dqk, dhv), the states before this process's spans; zero where a sequence begins
    n: Tensor  # (S, B, H, dqk)
    m: Tensor  # (S, B, H)
    last_m: Tensor  # (B, F, H), the max states after the fragments
    log_decay: Tensor  # (all spans, B, H), float64, of the last fragment of each span
    end_log_decay: Tensor  # (D, B, H), float64, of the fragments that end; with `final_state`


class Results(NamedTuple):
    """The results of a forward: h, the final states of all sequences, and what the backward needs."""

    h: Tensor  # (B, T, H, dhv)
    C: Tensor  # (B D, H, dqk, dhv); shape (0,) without `final_state`
    n: Tensor  # (B D, H, dqk)
    m: Tensor  # (B D, H)
    saved: Saved


# The tensors of a backend: fragments are its sequences.


class Shape(NamedTuple):
    """The form in which the backend gets the fragments of this process."""

    batch: int  # B
    offsets: tuple[int, ...] | None  # of packed fragments; None: they have equal lengths and are rows of a batch
    fragments: int

    @staticmethod
    def of(call: Call, batch: int) -> Shape:
        """Return the form for a batch: rows where fragments are equally long, else packed sequences."""
        found = call.cut.fragments
        if call.fragments is None and len({f.stop - f.start for f in found}) == 1:
            return Shape(batch, None, len(found))
        T, count = found[-1].stop, call.fragments or len(found)
        ends = [f.stop for f in found] + [T] * (count - len(found))
        return Shape(batch, (0, *(row * T + end for row in range(batch) for end in ends)), count)

    def view(self, x: Tensor) -> Tensor:
        """Return (B, T, ...) as the backend reads it."""
        if self.offsets is not None:
            return x.flatten(0, 1).unsqueeze(0)
        return x if self.fragments == 1 else x.unflatten(1, (self.fragments, -1)).flatten(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """Return a tensor of the backend as (B, T, ...)."""
        if self.offsets is not None:
            return x.squeeze(0).unflatten(0, (self.batch, -1))
        return x if self.fragments == 1 else x.unflatten(0, (self.batch, -1)).flatten(1, 2)


@functools.lru_cache(maxsize=64)
def _offsets_on(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    """Return offsets on a device. They are copied there once, not in each layer, and not while a graph is captured."""
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _of_sequences(x: Tensor | None, batch: int) -> Tensor | None:
    """Return states (B D, ...) as (B, D, ...)."""
    return None if x is None else x.unflatten(0, (batch, -1))


def _local(x: Inputs, shape: Shape, C: Tensor | None, n: Tensor | None, m: Tensor | None) -> Inputs:
    """Return the inputs of the backend."""
    q, k, v, log_i, log_f = (None if t is None else shape.view(t) for t in x[:5])
    offsets = None if shape.offsets is None else _offsets_on(x.q.device, shape.offsets)
    return Inputs(q, k, v, log_i, log_f, C, n, m, offsets)  # type: ignore[arg-type]


def _starts(x: Inputs, call: Call, shape: Shape, saved: Saved) -> list[Tensor | None]:
    """Return the states C, n, m before the fragments of this process, (B F, ...), or None where all are zero."""
    batch = x.q.shape[0]
    if all(span.source is None for span in call.cut.spans) and x.C is None:
        return [None, None, None]

    def each(given: Tensor | None, carried: Tensor) -> Tensor | None:
        if carried.dim() == 1:  # without a normalizer
            return None
        given = _of_sequences(given, batch)
        zero = torch.zeros_like(carried[0])
        rows = [zero] * shape.fragments
        at = 0
        for s, span in enumerate(call.cut.spans):
            for f in span.fragments:
                if not f.begins:
                    rows[at] = carried[s]
                elif given is not None:
                    rows[at] = given[:, f.sequence].to(zero.dtype)
                at += 1
        return rows[0] if len(rows) == 1 else torch.stack(rows, 1).flatten(0, 1)

    return [each(given, carried) for given, carried in zip((x.C, x.n, x.m), (saved.C, saved.n, saved.m), strict=True)]


# The spans of this process.


class Gated(NamedTuple):
    """The clamped log-gates of a call, (B, T, H); log_i None is 0."""

    log_i: Tensor | None
    log_f: Tensor

    @staticmethod
    def of(x: Inputs, spec: Spec) -> Gated:
        """Return the log-gates of the inputs."""
        if spec.gates == "log" or x.log_i is None:
            return Gated(None if x.log_i is None else clamp(x.log_i), clamp(x.log_f))
        return Gated(*log_gates(x.log_i, x.log_f, spec.gates))

    def at(self, steps: slice) -> Gated:
        """Return the gates of some steps."""
        return Gated(None if self.log_i is None else self.log_i[:, steps], self.log_f[:, steps])


def _own_state(x: Inputs, gates: Gated, f: Fragment, normalize: bool) -> Span:
    """Return the action of a fragment; it contains the initial state where the sequence begins."""
    steps, start = slice(f.start, f.stop), None
    if f.begins and x.C is not None:
        dtype = x.acc_dtype
        C, n, m = (_of_sequences(t, x.q.shape[0]) for t in (x.C, x.n, x.m))
        parts = (None if t is None else t[:, f.sequence].to(dtype) for t in (C, n, m))
        start = own_states.Start(*parts)  # type: ignore[arg-type]
    log_i, log_f = gates.at(steps)
    return own_states.own_state(x.k[:, steps], x.v[:, steps], log_i, log_f, normalize, start, f.begins)


def _state_rows(x: Inputs, call: Call) -> Tensor:
    """Return the rows that this process gives to the others, (S + additional rows, B, H, width).

    They are those of the last fragments of its spans. With `final_state` those of the other fragments that end follow.
    """
    B, H, K, V = x.q.shape[0], x.v.shape[2], x.q.shape[3], x.v.shape[3]
    spec, cut = call.spec, call.cut
    additional = cut.additional_rows if spec.final_state else 0
    width = row_width(K, V, spec.normalize)
    rows = x.q.new_zeros(len(cut.spans) + additional, B, H, width, dtype=x.acc_dtype)
    gates: Gated | None = None
    given = {s: span.fragments[-1] for s, span in enumerate(cut.spans) if spec.final_state or span.target is not None}
    if spec.final_state:
        given |= dict(enumerate(cut.additional, len(cut.spans)))
    for row, f in given.items():
        gates = Gated.of(x, spec) if gates is None else gates
        own = _own_state(x, gates, f, spec.normalize)
        rows[row] = to_rows(own.C, own.n, own.m, own.log_decay)
    return rows


def _final(call: Call, of_spans: Span, of_ranks: Span) -> Span:
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


def forward(x: Inputs, call: Call) -> Results:
    """Compute the forward of this process's part; the state arguments of ``x`` are those of whole sequences."""
    spec, placement = call.spec, call.placement
    (B, _, H, V), K = x.v.shape, x.q.shape[3]
    none = x.q.new_empty(0, dtype=x.acc_dtype)
    gathered = exchange.start_gather(_state_rows(x, call), call.group, placement.size)
    shape = Shape.of(call, B)
    of_ranks = from_rows(exchange.finish_gather(gathered, placement.size), K, V)
    of_spans = exchange.in_order_of_time(of_ranks, placement)
    carried = []
    for span in call.cut.spans:
        if span.source is not None:
            carried.append(compose(of_spans.at(slice(span.source, span.position))))
        else:
            zero = none.new_zeros(B, H, K, V)
            n, m = (zero[..., 0], zero[..., 0, 0]) if spec.normalize else (None, None)
            carried.append(Span(of_spans.log_decay[0], zero, n, m))
    before = stack(carried)
    saved = Saved(
        none, none, none, before.C, none if before.n is None else before.n, none if before.m is None else before.m,
        none, of_spans.log_decay.contiguous(), none,
    )  # fmt: skip
    # The cotangents of later spans are stabilized with the max states that the backend computes.
    with_last_m = spec.normalize and spec.save
    local = _local(x, shape, *_starts(x, call, shape, saved))
    out = BACKENDS[call.backend].forward(local, spec._replace(final_state=with_last_m))
    saved = saved._replace(d=out.d, chunk_C=out.chunk_C, chunk_n=out.chunk_n)
    if with_last_m:
        saved = saved._replace(last_m=out.m.unflatten(0, (B, -1)))
    h = shape.back(out.h)
    if not spec.final_state:
        return Results(h, none, none, none, saved)
    final = _final(call, of_spans, of_ranks)
    C, n, m = (none if t is None else t.transpose(0, 1).flatten(0, 1) for t in final[1:])
    return Results(h, C, n, m, saved._replace(end_log_decay=final.log_decay))


# The backward.


def _cotangent_rows(
    x: Inputs, h: Tensor, m: Tensor, saved: Saved, dh: Tensor, dC: Tensor | None, dn: Tensor | None, call: Call
) -> Tensor:
    """Return the rows that this process gives to the others, (S + D, B, H, width), or (S, ...) without final states.

    They are the cotangents of the states before its spans, and its cotangents of the final states.
    """
    B, H, K, V = x.q.shape[0], x.v.shape[2], x.q.shape[3], x.v.shape[3]
    spec, cut = call.spec, call.cut
    final = len(cut.ends) if spec.final_state else 0
    rows = dh.new_zeros(len(cut.spans) + final, B, H, row_width(K, V, spec.normalize), dtype=x.acc_dtype)
    zero = rows.new_zeros(B, H, dtype=torch.float64)
    gates = d = None
    for s, span in enumerate(cut.spans):
        if span.source is None:
            continue
        f = span.fragments[0]
        steps = slice(f.start, f.stop)
        if gates is None:
            gates = Gated.of(x, spec)
            d = Shape.of(call, B).back(saved.d) if spec.normalize else None
        out = own_states.Outputs(h[:, steps], None if d is None else d[:, steps], dh[:, steps])
        before = saved.m[s] if spec.normalize else None
        own = own_states.own_cotangent(x.q[:, steps], *gates.at(steps), before, out, spec.scale, spec.normalizer_grad)
        rows[s] = to_rows(own.C, own.n, own.m, zero)
    if final and (dC is not None or dn is not None):
        shape = (B * final, H, K, V)
        dC = rows.new_zeros(shape) if dC is None else dC
        if spec.normalize:
            dn = rows.new_zeros(shape[:-1]) if dn is None else dn
        final_C, final_n, final_m = (
            None if t is None else t.to(rows.dtype).unflatten(0, (B, -1)).transpose(0, 1)
            for t in (dC, dn, m if spec.normalize else None)
        )
        assert final_C is not None
        rows[len(cut.spans) :] = to_rows(final_C, final_n, final_m, zero.expand(final, B, H))
    return rows


def _ends(
    call: Call, saved: Saved, of_spans: Cotangent, of_final: Cotangent | None, shape: Shape
) -> tuple[Tensor | None, Tensor | None]:
    """Return the cotangents of the states after the fragments of this process, (B F, ...), or None where all are zero.

    Args:
        call: the call.
        saved: what the forward left.
        of_spans: (all spans, B, ...), the cotangents of the states before spans.
        of_final: (D, B, ...), the cotangents of the final states; None where there are none.
        shape: the form in which the backend gets the fragments.
    """
    normalize = call.spec.normalize
    rows: list[tuple[Tensor, Tensor | None] | None] = []
    for span in call.cut.spans:
        for f in span.fragments:
            # last_m has the backend's order of fragments.
            last_m = saved.last_m[:, len(rows)] if normalize else None
            end = call.cut.ends[f.sequence]
            parts, decays = [], []
            if not f.ends:
                later = slice(span.position + 1, end.position + 1)
                parts.append(Cotangent(*(None if t is None else t[later] for t in of_spans)))  # type: ignore[arg-type]
                decays.append(exclusive_sums(saved.log_decay[later], after=False))
            if of_final is not None:
                at = slice(f.sequence, f.sequence + 1)
                parts.append(Cotangent(*(None if t is None else t[at] for t in of_final)))  # type: ignore[arg-type]
                decay = torch.zeros_like(saved.log_decay[:1])
                if not f.ends:
                    between = saved.log_decay[span.position + 1 : end.position].sum(0, keepdim=True)
                    decay = between + saved.end_log_decay[at]
                decays.append(decay)
            if not parts:
                rows.append(None)
                continue
            every = Cotangent(*(None if t[0] is None else torch.cat(t) for t in zip(*parts, strict=True)))  # type: ignore[arg-type]
            rows.append(carry_back(every, torch.cat(decays), last_m))
    if all(row is None for row in rows):
        return None, None
    some = next(row for row in rows if row is not None)
    rows += [None] * (shape.fragments - len(rows))

    def merged(part: int) -> Tensor | None:
        like = some[part]
        if like is None:
            return None
        zero = torch.zeros_like(like)
        every = [zero if row is None or row[part] is None else row[part] for row in rows]
        return every[0] if len(every) == 1 else torch.stack(every, 1).flatten(0, 1)  # type: ignore[arg-type]

    return merged(0), merged(1)


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
    spec, placement, cut = call.spec, call.placement, call.cut
    (B, _, _, V), K = x.v.shape, x.q.shape[3]
    rows = _cotangent_rows(x, h, m, saved, dh, dC, dn, call)
    gathered = exchange.start_gather(rows, call.group, placement.size)
    shape = Shape.of(call, B)
    local = _local(x, shape, *_starts(x, call, shape, saved))
    none = saved.d.new_empty(0)
    out = Outputs(shape.view(h), none, none, none, saved.d, saved.chunk_C, saved.chunk_n)
    of_ranks = from_rows(exchange.finish_gather(gathered, placement.size), K, V)
    of_final = None
    if spec.final_state:
        C, n, final_m = (None if t is None else t[:, len(cut.spans) :] for t in of_ranks[1:])
        assert C is not None
        of_final = Cotangent(
            C.sum(0), None if n is None else n.sum(0),
            m.unflatten(0, (B, -1)).transpose(0, 1) if spec.normalize else final_m,
        )  # fmt: skip
    of_spans = Cotangent(*exchange.in_order_of_time(of_ranks, placement)[1:])
    grads = BACKENDS[call.backend].backward(
        local, out, shape.view(dh), *_ends(call, saved, of_spans, of_final, shape), spec._replace(final_state=False)
    )
    return _of_inputs(x, grads, shape, call, of_final)


def _of_inputs(
    x: Inputs, grads: Grads, shape: Shape, call: Call, of_final: Cotangent | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments from those of the backend."""
    found = [None if t is None else shape.back(g).to(t.dtype) for t, g in zip(x[:5], grads[:5], strict=True)]
    if x.C is None:
        return (*found, None, None, None)
    begins = [(at, f.sequence) for at, f in enumerate(call.cut.fragments) if f.begins]
    empty = [f.sequence for f in call.cut.additional if f.start == f.stop]

    def of_state(given: Tensor | None, grad: Tensor, final: Tensor | None) -> Tensor | None:
        if given is None:
            return None
        rows = torch.zeros_like(given, dtype=x.acc_dtype).unflatten(0, (shape.batch, -1))
        of_fragments = grad.unflatten(0, (shape.batch, -1))
        for at, sequence in begins:
            rows[:, sequence] = of_fragments[:, at]
        for sequence in empty:
            if final is not None:
                rows[:, sequence] = final[sequence]
        return rows.flatten(0, 1)

    of_C, of_n = (None, None) if of_final is None else of_final[:2]
    dC, dn = of_state(x.C, grads.C, of_C), of_state(x.n, grads.n, of_n)
    assert dC is not None
    dm = None
    if x.n is not None and x.m is not None and dn is not None:  # the true initial state is exp(m) C, exp(m) n
        dm = ((x.C * dC).sum((-2, -1)) + (x.n * dn).sum(-1)).to(x.m.dtype)
    return (*found, dC.to(x.C.dtype), dn if dn is None or x.n is None else dn.to(x.n.dtype), dm)
