"""Chunkwise in plain PyTorch: for CPUs and every device PyTorch runs on.

A sequence is cut into chunks of `chunk_size` steps, whose first states are stored for the backward; a chunk is walked
in blocks of tiles (:mod:`.block`). So a large chunk costs the FLOPs of a small one, and stores as little as it should.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import (
    Backend,
    Grads,
    Inputs,
    Outputs,
    Spec,
    initial_state,
    input_gate,
    own,
    sequence_bounds,
    sequence_slot,
)
from tfla.backends.chunkwise import block
from tfla.backends.chunkwise.gates import TileGates, max_state, tile_gates
from tfla.backends.chunkwise.workspace import Workspace, empty

TILE = 64
BLOCK_BYTES = 2 << 20  # states of one block: small enough to stay in a core's cache
MAX_TILES = 16


class Span(NamedTuple):
    """Sequences computed together: rows of a dense batch, or one packed sequence."""

    rows: slice  # of the batch
    start: int
    stop: int
    states: slice  # rows of the state
    slots: list[int]  # first chunk state of each


class Part(NamedTuple):
    """One block: n tiles of L steps from step t on."""

    t: int
    n: int
    L: int

    @property
    def stop(self) -> int:
        return self.t + self.n * self.L


def spans(x: Inputs, chunk_size: int) -> list[Span]:
    """Packed sequences one by one, equal ones all together."""
    bounds = sequence_bounds(x)
    slots = [sequence_slot(x, chunk_size, s, a) for s, (_, a, _) in enumerate(bounds)]
    if x.cu_seqlens is None:
        return [Span(slice(0, len(bounds)), 0, x.v.shape[1], slice(0, len(bounds)), slots)] if bounds else []
    return [Span(slice(0, 1), a, b, slice(s, s + 1), slots[s : s + 1]) for s, (_, a, b) in enumerate(bounds) if b > a]


def parts(start: int, stop: int, tiles: int) -> Iterator[Part]:
    """The blocks of a chunk: as many whole tiles as fit, then what is left as a tile of its own."""
    tile = min(TILE, stop - start)
    while stop - start >= tile:
        n = min(tiles, (stop - start) // tile)
        yield Part(start, n, tile)
        start += n * tile
    if start < stop:
        yield Part(start, 1, stop - start)


class Plan(NamedTuple):
    """How many tiles and heads a block has."""

    tiles: int
    heads: int

    @staticmethod
    def of(x: Inputs) -> Plan:
        B, T, H, V = x.v.shape
        state = x.q.shape[3] * V * x.acc_dtype.itemsize
        tiles = max(1, min(MAX_TILES, -(-T // TILE), max(4, BLOCK_BYTES // state)))
        return Plan(tiles, max(1, min(B * H, BLOCK_BYTES // (tiles * state))))


class Group(NamedTuple):
    """Heads computed together: all of some rows, or some of one row. Copies nothing where it is a single head."""

    rows: slice
    heads: slice
    qk_heads: slice | Tensor  # one for each of `heads`, or the one they share

    def qk(self, x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """q or k of a block, (n, N, L, dqk)."""
        x = x[self.rows, part.t : part.stop]
        x = x[:, :, self.qk_heads]
        return _tiles(x, part).to(dtype)

    def v(self, x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """v, h or a cotangent of it, (n, N, L, dhv)."""
        return _tiles(x[self.rows, part.t : part.stop, self.heads], part).to(dtype)

    def state(self, states: Tensor, slots: list[int]) -> Tensor:
        """Chunk states (N, ...) from where the rows' sequences have theirs."""
        return states[slots[self.rows], self.heads].flatten(0, 1)

    def put(self, out: Tensor, part: Part, x: Tensor, divisor: Tensor | None = None) -> None:
        """Stores (n, N, L, d), divided, where `v` would read it."""
        out = out[self.rows, part.t : part.stop, self.heads].unflatten(1, (part.n, part.L)).permute(1, 0, 3, 2, 4)
        x = x.unflatten(1, out.shape[1:3])
        if divisor is None:
            out.copy_(x)
        else:
            torch.div(x, divisor.unflatten(1, out.shape[1:3]), out=out)


def _tiles(x: Tensor, part: Part) -> Tensor:
    """(B, n L, H, d) as (n, B H, L, d)."""
    return x.unflatten(1, (part.n, part.L)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def groups(rows: int, x: Inputs, heads: int) -> list[Group]:
    """All heads of as many rows as allowed, or where not even one row fits, some heads of one row."""
    H, share = x.v.shape[2], x.v.shape[2] // x.q.shape[2]
    if heads >= H:
        each = heads // H
        every = slice(None) if share == 1 else torch.arange(H, device=x.q.device) // share
        return [Group(slice(r, min(r + each, rows)), slice(0, H), every) for r in range(0, rows, each)]
    found = []
    for r in range(rows):
        for a in range(0, H, heads):
            b = min(a + heads, H)
            qk: slice | Tensor = slice(a, b)
            if share > 1:
                qk = torch.arange(a, b, device=x.q.device) // share if b - a > 1 else slice(a // share, a // share + 1)
            found.append(Group(slice(r, r + 1), slice(a, b), qk))
    return found


class Walk:
    """What forward and backward share: inputs of one span, its groups of heads, its gates."""

    def __init__(self, x: Inputs, spec: Spec, span: Span, plan: Plan, m: Tensor) -> None:
        self.x, self.spec, self.plan = x, spec, plan
        self.dtype = x.acc_dtype
        self.span = span
        rows = span.rows.stop - span.rows.start
        self.groups = groups(rows, x, plan.heads)
        self.q, self.k, self.v = (t[span.rows] for t in (x.q, x.k, x.v))
        self.H = x.v.shape[2]

        def rows_first(g: Tensor) -> Tensor:  # (N, T) float64
            return g[span.rows, span.start : span.stop].double().transpose(1, 2).flatten(0, 1)

        self.log_f, self.log_i = rows_first(x.log_f), rows_first(input_gate(x))
        self.m: Tensor | None = None
        if spec.normalize:
            # The stabiliser is free to choose, so it may be rounded: states are kept with it.
            self.m_start = m[span.states].flatten().double()
            self.m = max_state(self.log_i, self.log_f, self.m_start).to(self.dtype).double()

    def chunks(self) -> list[tuple[int, int]]:
        a, b, c = self.span.start, self.span.stop, self.spec.chunk_size
        return [(t, min(t + c, b)) for t in range(a, b, c)]

    def gates(self, part: Part) -> TileGates:
        at = slice(part.t - self.span.start, part.stop - self.span.start)
        log_i, log_f = (g[:, at].unflatten(1, (part.n, part.L)) for g in (self.log_i, self.log_f))
        if self.m is None:
            return tile_gates(log_i, log_f, None, None, self.spec.scale, self.dtype)
        before = self.m[:, at.start - 1] if at.start else self.m_start
        m = self.m[:, at].unflatten(1, (part.n, part.L))
        return tile_gates(log_i, log_f, m, before, self.spec.scale, self.dtype)

    def flat(self, group: Group) -> slice:
        """The rows of (B H) that a group has."""
        first = group.rows.start * self.H + group.heads.start
        return slice(first, first + (group.rows.stop - group.rows.start) * (group.heads.stop - group.heads.start))


class Chunkwise(Backend):
    name = "chunkwise"
    priority = 0
    kernels = ("segmented",)

    def unsupported(self, x: Inputs) -> str | None:
        return None

    def default_chunk_size(self, x: Inputs) -> int:
        return TILE * MAX_TILES

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        C, n, m = initial_state(x, spec)
        none = C.new_empty(0)
        rows = self.stored_states(x, spec.chunk_size) if spec.save else 0
        kept = empty((rows, *C.shape[1:]), C.dtype, C.device) if spec.save else none
        kept_n = n.new_empty(rows, *n.shape[1:]) if spec.save and spec.normalize else none.clone()
        h = empty(x.v.shape, x.v.dtype, x.v.device)
        d = torch.empty(x.log_f.shape, dtype=C.dtype, device=C.device) if spec.normalize and spec.save else none.clone()
        plan, work = Plan.of(x), Workspace(x.q, C.dtype)
        for span in spans(x, spec.chunk_size):
            walk = Walk(x, spec, span, plan, m)
            C_span = C[span.states].flatten(0, 1)
            n_span = n[span.states].flatten(0, 1) if spec.normalize else n
            for index, (start, stop) in enumerate(walk.chunks()):
                if spec.save:
                    slots = [s + index for s in span.slots]
                    kept[slots] = C_span.unflatten(0, (-1, walk.H))
                    if spec.normalize:
                        kept_n[slots] = n_span.unflatten(0, (-1, walk.H))
                for part in parts(start, stop, plan.tiles):
                    gates = walk.gates(part)
                    for group in walk.groups:
                        at = walk.flat(group)
                        q, k = (group.qk(t, part, walk.dtype) for t in (walk.q, walk.k))
                        v = group.v(walk.v, part, walk.dtype)
                        n_at = n_span[at] if spec.normalize else n
                        own = gates.head(at)
                        out, d_out, C_span[at], n_new = block.forward(q, k, v, own, C_span[at], n_at, spec, work)
                        if d_out is None:
                            group.put(h[span.rows], part, out)
                            continue
                        group.put(h[span.rows], part, out, torch.maximum(d_out.abs(), own.floor))
                        n_span[at] = n_new
                        if spec.save:
                            group.put(d[span.rows].unsqueeze(-1), part, d_out)
            if spec.normalize and spec.final_state and walk.m is not None:
                m[span.states] = walk.m[:, -1].to(m.dtype).view(-1, walk.H)
        if not spec.final_state:
            C, n, m = none.clone(), none.clone(), none.clone()
        return Outputs(h, C, n, m, d, kept, kept_n)

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        C0, n0, m = initial_state(x, spec)
        dC_all = torch.zeros_like(C0) if dC is None else own(dC, C0.dtype)
        dn_all = torch.zeros_like(n0) if dn is None else own(dn, C0.dtype)
        shared = x.q.shape[2] != x.v.shape[2]
        dq, dk = (empty(t.shape, C0.dtype if shared else t.dtype, t.device) for t in (x.q, x.k))
        if shared:  # heads that share q and k add up
            dq, dk = dq.zero_(), dk.zero_()
        dv = empty(x.v.shape, x.v.dtype, x.v.device)
        dlog_i, dlog_f = (torch.empty(x.log_f.shape, dtype=C0.dtype, device=C0.device) for _ in range(2))
        plan, work = Plan.of(x), Workspace(x.q, C0.dtype)
        for span in spans(x, spec.chunk_size):
            walk = Walk(x, spec, span, plan, m)
            dC_span = dC_all[span.states].flatten(0, 1)
            dn_span = dn_all[span.states].flatten(0, 1) if spec.normalize else dn_all
            for index, (start, stop) in reversed(list(enumerate(walk.chunks()))):
                slots = [s + index for s in span.slots]
                chunk_parts = list(parts(start, stop, plan.tiles))
                chunk_gates = [walk.gates(part) for part in chunk_parts]
                for group in walk.groups:
                    at = walk.flat(group)
                    C = group.state(out.chunk_C, slots)
                    n = group.state(out.chunk_n, slots) if spec.normalize else n0
                    inside = [(C, n)]  # states before each block
                    for part, gates in zip(chunk_parts[:-1], chunk_gates[:-1], strict=True):
                        k, v = group.qk(walk.k, part, walk.dtype), group.v(walk.v, part, walk.dtype)
                        C, n = block.final_state(k, v, gates.head(at), C, n, spec, work)
                        C = C.clone()
                        inside.append((C, n))
                    for part, gates, (C, n) in reversed(list(zip(chunk_parts, chunk_gates, inside, strict=True))):
                        q, k = (group.qk(t, part, walk.dtype) for t in (walk.q, walk.k))
                        v, h, g = (group.v(t, part, walk.dtype) for t in (walk.v, out.h[span.rows], dh[span.rows]))
                        d = group.v(out.d[span.rows].unsqueeze(-1), part, walk.dtype) if spec.normalize else h
                        dn_at = dn_span[at] if spec.normalize else dn_span
                        grad = block.backward(q, k, v, gates.head(at), C, n, h, d, g, dC_span[at], dn_at, spec, work)
                        dC_span[at] = grad.C
                        if spec.normalize:
                            dn_span[at] = grad.n
                        for target, value in ((dq, grad.q), (dk, grad.k)):
                            self._put_qk(group, target[span.rows], part, value, shared)
                        group.put(dv[span.rows], part, grad.v)
                        for gate, flat in ((dlog_i, grad.log_i), (dlog_f, grad.log_f)):
                            tiles = flat.unflatten(1, (part.n, part.L)).transpose(0, 1).unsqueeze(-1)
                            group.put(gate[span.rows].unsqueeze(-1), part, tiles)
        return Grads(dq, dk, dv, dlog_i, dlog_f, dC_all, dn_all)

    @staticmethod
    def _put_qk(group: Group, target: Tensor, part: Part, value: Tensor, shared: bool) -> None:
        """Stores a cotangent of q or k; where heads of v share one, adds it up."""
        if not shared:
            group.put(target, part, value)
            return
        target = target[group.rows, part.t : part.stop]
        heads = group.heads.stop - group.heads.start
        value = value.unflatten(1, (-1, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)  # (rows, n L, heads, dqk)
        if isinstance(group.qk_heads, slice):
            target[:, :, group.qk_heads] += value
        else:
            target.index_add_(2, group.qk_heads, value)


BACKEND = Chunkwise()
