"""Attention over the steps of several processes, whose keys and values go from process to process.

In round s every process sends its keys and values to the process s places after it, while it attends to those that it
has received before. It holds those of two other processes at most, whatever their number. What a process receives is
what its queries may see: nothing of later spans, and with a window only the last steps before its own. The backward
sends keys and values once more, and returns their gradients to the processes that have them.

Forward and backward are operators, which torch.compile takes as they are: its graph would have every pair of spans.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla.nn.mixers.block_attention import Block, accumulator_dtype, attend_block, block_gradients, merge
from tfla.nn.mixers.spans import Spans


class Rows(NamedTuple):
    """Steps of a span whose keys and values one process sends to another."""

    span: int
    """The place of the span in time."""
    start: int
    """The first step, in the whole sequence."""
    stop: int
    here: int
    """The first step in the tensors of the process that has them."""


class Ring:
    """The exchange of keys and values among the processes that share the steps of sequences.

    Args:
        spans: the spans of all processes.
        window: the number of last keys that a query sees; None is all.
        offsets: the offsets of packed sequences in the whole sequence, equal on all processes; None where documents are
            not known on the host.
        documents: whether there are documents.

    Attributes:
        lowest: for each span in the order of time, a key before which its queries see none.
        highest: for each span, a key from which on each of its queries sees all up to its own.
    """

    def __init__(self, spans: Spans, window: int | None, offsets: list[int] | None, documents: bool) -> None:
        self.spans, self.window = spans, window
        bounds = spans.bounds
        total = bounds[-1]
        self.lowest, self.highest = [0] * len(spans.lengths), [total if documents else 0] * len(spans.lengths)
        for position, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if offsets is not None:
                self.lowest[position] = max(a for a in offsets if a <= start)
                self.highest[position] = max(a for a in offsets if a < stop)
            if window is not None:
                self.lowest[position] = max(self.lowest[position], start - window + 1)
                self.highest[position] = max(self.highest[position], stop - window)
        self.rank = spans.positions[0]
        self.rounds = [
            s for s in range(1, spans.size) if any(self.rows(r, (r + s) % spans.size) for r in range(spans.size))
        ]

    def rows(self, source: int, target: int) -> list[Rows]:
        """Return the steps whose keys and values one process sends to another."""
        spans, found, here = self.spans, [], 0
        for p in spans.of_rank(source):
            start, stop = spans.bounds[p], spans.bounds[p + 1]
            reached = [max(start, self.lowest[later]) for later in spans.of_rank(target) if later > p]
            if reached and min(reached) < stop:
                found.append(Rows(p, min(reached), stop, here + min(reached) - start))
            here += stop - start
        return found

    def peers(self, s: int) -> tuple[list[Rows], list[Rows], int, int]:
        """Return the steps that this process sends in a round and those that it gets, and to whom and from whom."""
        size = self.spans.size
        target, source = (self.rank + s) % size, (self.rank - s) % size
        return self.rows(self.rank, target), self.rows(source, self.rank), target, source

    def start(self, s: int, x: Tensor) -> Tensor:
        """Start a round: send the rows of x (T, ...) that another process reads. The result is read after a wait."""
        sent, got, target, source = self.peers(s)
        given = [x[r.here : r.here + r.stop - r.start] for r in sent]
        return self._exchange(torch.cat(given) if given else x[:0], got, target, source)

    def start_return(self, s: int, dx: Tensor) -> Tensor:
        """Start the return of the gradients of what a round has brought, (rows, ...)."""
        sent, _, target, source = self.peers(s)
        return self._exchange(dx, sent, source, target)

    def _exchange(self, x: Tensor, got: list[Rows], target: int, source: int) -> Tensor:
        """Start to send x to a process and to receive rows from another one."""
        given, received = [0] * self.spans.size, [0] * self.spans.size
        given[target], received[source] = x.shape[0], sum(r.stop - r.start for r in got)
        return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, given, self.spans.group)

    def block(self, own: int, span: int, key: int, first: Tensor | None) -> Block:
        """Return the block of keys of a span from ``key`` on, for the queries of one of this process's spans.

        Args:
            own, span: the places of both spans in time.
            key: the first key.
            first: (B, T of the span) as :class:`Block` has it; left out where it hides nothing of the block.
        """
        window = None if key >= self.highest[own] else self.window
        return Block(self.spans.bounds[own], key, None if key >= self.highest[own] else first, window)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    spans: Spans,
    window: int | None,
) -> Tensor:
    """Return the attention of this process's steps to all steps up to them.

    Args:
        q: (B, T, H, d) of this process's steps.
        k, v: (B, T, Hkv, d) of the same dtype.
        first: (B, T) or (1, T) int64, the first step that each query may see, in the whole sequence; None is 0.
        sinks: (H,) as in :func:`tfla.nn.mixers.attend.attend`.
        cu_seqlens: the offsets of packed sequences in the whole sequence, on the CPU, by which ``first`` was made; None
            where documents are not known on the host.
        spans: the spans of all processes.
        window: the number of last keys that a query sees; None is all.

    Returns:
        (B, T, H, d).
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # as it does to torch's attention
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    place = spans.group, spans.positions[0], spans.zigzag, spans.lengths
    out: Tensor = _attend(q, k, v, first, sinks, cu_seqlens, *place, window)[0]
    return out.transpose(1, 2)


def _ring(
    group: str, rank: int, zigzag: bool, lengths: list[int], window: int | None, cu_seqlens: Tensor | None,
    first: Tensor | None,
) -> Ring:  # fmt: skip
    """Return the exchange of a call."""
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    return Ring(Spans.placed(group, rank, zigzag, lengths), window, offsets, first is not None)


# Written out, since earlier versions of PyTorch infer no list[int].
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? first, Tensor? sinks, Tensor? cu_seqlens"
_PLACE = "str group, int rank, bool zigzag, SymInt[] lengths, int? window"


@torch.library.custom_op("tfla::ring_attention", mutates_args=(), schema=f"({_TENSORS}, {_PLACE}) -> (Tensor, Tensor)")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None, cu_seqlens: Tensor | None,
    group: str, rank: int, zigzag: bool, lengths: list[int], window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the forward: the attention (B, H, T, d), and the log-sum-exp of the logits (B, H, T)."""
    ring = _ring(group, rank, zigzag, lengths, window, cu_seqlens, first)
    with torch.autocast(q.device.type, enabled=False):
        return _forward(ring, q.transpose(1, 2), _rows(k, v), first, sinks)


@_attend.register_fake
def _attend_fake(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of the forward."""
    B, T, H, d = q.shape
    return q.new_empty(B, H, T, d), q.new_empty(B, H, T, dtype=accumulator_dtype(q.dtype))


@torch.library.custom_op(
    "tfla::ring_attention_backward", mutates_args=(),
    schema=f"({_TENSORS}, Tensor out, Tensor lse, Tensor dh, {_PLACE}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None, cu_seqlens: Tensor | None,
    out: Tensor, lse: Tensor, dh: Tensor,
    group: str, rank: int, zigzag: bool, lengths: list[int], window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k, v and of the logits of sinks, (0,) where there are none."""
    ring = _ring(group, rank, zigzag, lengths, window, cu_seqlens, first)
    with torch.autocast(q.device.type, enabled=False):
        delta = (dh.to(lse.dtype) * out).sum(-1)
        dq, drows = _backward(ring, q.transpose(1, 2), _rows(k, v), first, out, lse, dh.contiguous(), delta)
        dk, dv = (t.transpose(0, 1) for t in drows.chunk(2, -1))
        dsinks = delta.new_empty(0)
        if sinks is not None:
            dsinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
    whole = torch.contiguous_format
    dq, dk, dv = (t.to(q.dtype, copy=True, memory_format=whole) for t in (dq.transpose(1, 2), dk, dv))
    return dq, dk, dv, dsinks


@_attend_backward.register_fake
def _attend_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tensors of the shapes of the backward."""
    dsinks = q.new_empty(0, dtype=accumulator_dtype(q.dtype)) if sinks is None else torch.empty_like(sinks)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward reads."""
    *tensors, ctx.group, ctx.rank, ctx.zigzag, ctx.lengths, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, dh: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of the forward."""
    place = ctx.group, ctx.rank, ctx.zigzag, ctx.lengths, ctx.window
    saved = ctx.saved_tensors  # read once, as activation checkpointing demands
    dq, dk, dv, dsinks = _attend_backward(*saved, dh, *place)
    return dq, dk, dv, None, None if saved[4] is None else dsinks, *[None] * 6


_attend.register_autograd(_differentiate, setup_context=_save)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values as rows of one tensor, (T, B, Hkv, 2 d)."""
    return torch.cat([k, v], -1).transpose(0, 1)


def _keys_values(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v (B, Hkv, steps, d) from rows (steps, B, Hkv, 2 d)."""
    k, v = rows.permute(1, 2, 0, 3).chunk(2, -1)
    return k, v


class _Pair(NamedTuple):
    """Queries of a span of this process and keys of a span of any process."""

    here: slice
    """The queries in this process's tensors."""
    keys: slice
    """The keys in the rows in which they are."""
    block: Block


def _own_pairs(ring: Ring, first: Tensor | None) -> list[_Pair]:
    """Return the pairs of queries and keys that this process has itself; the first of each span is its own."""
    spans, found = ring.spans, []
    placed = list(zip(spans.positions, spans.own, strict=True))
    for own, here in placed:
        for span, keys in sorted(placed, key=lambda pair: -pair[0]):
            if span == own or (span < own and ring.lowest[own] < spans.bounds[span + 1]):
                cut = max(0, ring.lowest[own] - spans.bounds[span])
                block = ring.block(own, span, spans.bounds[span] + cut, _of(first, here))
                found.append(_Pair(here, slice(keys.start + cut, keys.stop), block))
    return found


def _received_pairs(ring: Ring, s: int, first: Tensor | None) -> list[_Pair]:
    """Return the pairs of this process's queries and the keys that a round brings."""
    spans, found, at = ring.spans, [], 0
    for rows in ring.peers(s)[1]:
        for own, here in zip(spans.positions, spans.own, strict=True):
            key = max(rows.start, ring.lowest[own])
            if own > rows.span and key < rows.stop:
                keys = slice(at + key - rows.start, at + rows.stop - rows.start)
                found.append(_Pair(here, keys, ring.block(own, rows.span, key, _of(first, here))))
        at += rows.stop - rows.start
    return found


def _of(first: Tensor | None, here: slice) -> Tensor | None:
    """Return the columns of ``first`` of some queries."""
    return None if first is None else first[:, here]


def _forward(ring: Ring, q: Tensor, rows: Tensor, first: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the attention (B, H, T, d) and the log-sum-exp of the logits (B, H, T), that of the sinks included."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(pairs: list[_Pair], rows: Tensor) -> None:
        """Merge the attention of pairs into that of their spans."""
        for here, keys, block in pairs:
            new = attend_block(q[:, :, here], *_keys_values(rows[keys]), block)
            found[here.start] = merge(*found[here.start], *new) if here.start in found else new

    rounds = ring.rounds
    coming = ring.start(rounds[0], rows) if rounds else None
    attend(_own_pairs(ring, first), rows)
    for s, following in itertools.zip_longest(rounds, rounds[1:]):
        received = torch.ops._c10d_functional.wait_tensor(coming)
        coming = None if following is None else ring.start(following, rows)
        attend(_received_pairs(ring, s, first), received)
    parts = [found[here.start] for here in ring.spans.own]
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    if sinks is not None:
        both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = out * (lse - both).exp()[..., None], both
    return out.to(q.dtype), lse


def _backward(
    ring: Ring, q: Tensor, rows: Tensor, first: Tensor | None, out: Tensor, lse: Tensor, dh: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q (B, H, T, d) and of the rows (T, B, Hkv, 2 d), in the dtype of accumulators."""
    dtype = accumulator_dtype(q.dtype)
    dq, drows = torch.zeros_like(q, dtype=dtype), torch.zeros_like(rows, dtype=dtype)

    def attend(pairs: list[_Pair], rows: Tensor, drows: Tensor) -> None:
        """Add the gradients of pairs to those of their queries and keys."""
        for here, keys, block in pairs:
            k, v = _keys_values(rows[keys])
            own_q, own_out, own_lse, own_dh, own_delta = (t[:, :, here] for t in (q, out, lse, dh, delta))
            new = block_gradients(own_q, k, v, own_out, own_lse, own_dh, own_delta, block)
            dq[:, :, here] += new.q
            drows[keys] += torch.cat([new.k, new.v], -1).permute(2, 0, 1, 3)

    def add_returned(s: int, returned: Tensor) -> None:
        """Add the gradients that a round has returned to this process."""
        brought, at = torch.ops._c10d_functional.wait_tensor(returned), 0
        for sent in ring.peers(s)[0]:
            count = sent.stop - sent.start
            drows[sent.here : sent.here + count] += brought[at : at + count]
            at += count

    rounds = ring.rounds
    coming = ring.start(rounds[0], rows) if rounds else None
    attend(_own_pairs(ring, first), rows, drows)
    returning: tuple[int, Tensor] | None = None
    for s, following in itertools.zip_longest(rounds, rounds[1:]):
        received = torch.ops._c10d_functional.wait_tensor(coming)
        coming = None if following is None else ring.start(following, rows)
        gradients = torch.zeros_like(received, dtype=dtype)
        attend(_received_pairs(ring, s, first), received, gradients)
        if returning is not None:
            add_returned(*returning)
        returning = s, ring.start_return(s, gradients)
    if returning is not None:
        add_returned(*returning)
    return dq, drows
