"""The chunkwise backend in plain PyTorch, for CPUs and every device that PyTorch runs on.

It is tested on CPUs and NVIDIA GPUs. Inputs in float32, bfloat16 and float16 are computed without float64, which tests
check, since some devices have none. Such devices are expected to work and are not tested: Apple's GPUs ("mps") need a
PyTorch that has `cummax` there, or PYTORCH_ENABLE_MPS_FALLBACK=1. Inputs in float64 need a device that has float64.

A sequence is divided into chunks of `chunk_size` steps, and the state before each chunk is stored for the backward. A
chunk is computed in blocks of tiles of 64 steps (:mod:`.block`), so that its FLOPs do not depend on its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfla.backends.base import TILE, Backend, Grads, Inputs, Outputs, Spec, initial_state, input_gate, own, stored_dtype
from tfla.backends.chunkwise import block
from tfla.backends.chunkwise.delta import DELTA_BACKEND
from tfla.backends.chunkwise.gates import GROWTH, TileGates, max_state, stabilized, steps_of_a_tile, tile_gates
from tfla.backends.chunkwise.layout import MAX_TILES, Group, Part, Span, groups, parts, spans
from tfla.backends.chunkwise.workspace import Workspace, empty


class Scan:
    """The scan over the chunks of one span for one group of heads, in both directions."""

    def __init__(self, x: Inputs, spec: Spec, span: Span, group: Group, m: Tensor) -> None:
        self.spec, self.span, self.group, self.dtype = spec, span, group, x.acc_dtype
        self.q, self.k, self.v = (t[span.rows] for t in (x.q, x.k, x.v))
        self.states = span.states.start + group.rows.start, span.states.start + group.rows.stop

        def rows_first(g: Tensor) -> Tensor:  # (N, T)
            g = g[span.rows, span.start : span.stop][group.rows, :, group.heads]
            return g.to(self.dtype).transpose(1, 2).flatten(0, 1)

        self.log_f, self.log_i = rows_first(x.log_f), rows_first(input_gate(x))
        self.m: Tensor | None = None
        if spec.normalize:
            m_start = self.of_group(m).flatten()
            self.m = max_state(self.log_i, self.log_f, m_start)
            self.log_i, self.log_f = stabilized(self.log_i, self.log_f, self.m, m_start)
        # With a normalizer no weight exceeds 1, so that the state cannot grow.
        self.grows = not spec.normalize and bool((self.log_f > 0.0).any() | (self.log_i > GROWTH).any())

    def of_group(self, states: Tensor) -> Tensor:
        """Return the group's rows and heads of (sequences, H, ...), a view."""
        return states[self.states[0] : self.states[1], self.group.heads]

    def chunks(self) -> list[tuple[int, int, list[int]]]:
        """Return (first step, one past the last step, rows of the stored states) of each chunk."""
        a, b, c = self.span.start, self.span.stop, self.spec.chunk_size
        return [(t, min(t + c, b), [s + n for s in self.span.chunk_rows]) for n, t in enumerate(range(a, b, c))]

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Return the blocks of a chunk; tiles are shorter where the state grows fast."""
        tile = TILE
        if self.grows:
            at = slice(start - self.span.start, stop - self.span.start)
            tile = steps_of_a_tile(self.log_i[:, at], self.log_f[:, at], TILE)
        return parts(start, stop, tile)

    def gates(self, part: Part) -> TileGates:
        """Return the weights of the tiles of a block."""

        def tiles(x: Tensor) -> Tensor:
            return x[:, part.t - self.span.start : part.stop - self.span.start].unflatten(1, (part.n, part.L))

        m = None if self.m is None else tiles(self.m)
        return tile_gates(tiles(self.log_i), tiles(self.log_f), m, self.spec.scale)

    def forward(self, out: Outputs, work: Workspace) -> None:
        """Compute this scan's part of `out`.

        `out.C`, `out.n` and `out.m` have the initial state before the call and the final state after it.
        """
        spec, group, span = self.spec, self.group, self.span
        C = self.of_group(out.C).flatten(0, 1).clone()
        n = self.of_group(out.n).flatten(0, 1).clone() if spec.normalize else out.n
        for start, stop, chunk_rows in self.chunks():
            if spec.save:
                group.store_state(out.chunk_C, chunk_rows, C)
                if spec.normalize:
                    group.store_state(out.chunk_n, chunk_rows, n)
            for part in self.parts(start, stop):
                gates = self.gates(part)
                q, k = (group.qk(t, part, self.dtype) for t in (self.q, self.k))
                v = group.v(self.v, part, self.dtype)
                h, d, n = block.forward(q, k, v, gates, C, n, spec, work)
                if d is None:
                    group.store(out.h[span.rows], part, h)
                    continue
                group.store(out.h[span.rows], part, h, torch.maximum(d.abs(), gates.floor))
                if spec.save:
                    group.store(out.d[span.rows].unsqueeze(-1), part, d)
        self.store_state(out.C, C)
        if self.m is not None:
            self.store_state(out.n, n)
            self.store_state(out.m, self.m[:, -1])

    def store_state(self, states: Tensor, x: Tensor) -> None:
        """Store (N, ...) to the group's part of (sequences, H, ...)."""
        target = self.of_group(states)
        target.copy_(x.view(target.shape))

    def backward(self, out: Outputs, dh: Tensor, grads: Grads, work: Workspace) -> None:
        """Compute this scan's part of `grads`, from the last chunk to the first.

        The states before the blocks of a chunk are computed again from the stored one. `grads.C` and `grads.n` have the
        cotangent of the final state before the call and that of the initial state after it.
        """
        spec, group, span = self.spec, self.group, self.span
        dC = self.of_group(grads.C).flatten(0, 1).clone()
        dn = self.of_group(grads.n).flatten(0, 1).clone() if spec.normalize else grads.n
        for start, stop, chunk_rows in reversed(self.chunks()):
            C = group.state(out.chunk_C, chunk_rows).to(self.dtype)
            n = group.state(out.chunk_n, chunk_rows) if spec.normalize else dn
            blocks = []  # each with its gates and the state before it
            for part in self.parts(start, stop):
                gates = self.gates(part)
                blocks.append((part, gates, C, n))
                if part.stop < stop:
                    k, v = group.qk(self.k, part, self.dtype), group.v(self.v, part, self.dtype)
                    C, n = block.final_state(k, v, gates, C, n, spec, work)
            for part, gates, C, n in reversed(blocks):
                q, k = (group.qk(t, part, self.dtype) for t in (self.q, self.k))
                v, h, g = (group.v(t, part, self.dtype) for t in (self.v, out.h[span.rows], dh[span.rows]))
                d = group.v(out.d[span.rows].unsqueeze(-1), part, self.dtype) if spec.normalize else h
                grad = block.backward(q, k, v, gates, C, n, h, d, g, dC, dn, spec, work)
                dn = grad.n
                group.store_qk(grads.q[span.rows], part, grad.q)
                group.store_qk(grads.k[span.rows], part, grad.k)
                group.store(grads.v[span.rows], part, grad.v)
                for gate, tiles in ((grads.log_i, grad.log_i), (grads.log_f, grad.log_f)):
                    group.store(gate[span.rows].unsqueeze(-1), part, tiles.unsqueeze(-1))
        self.store_state(grads.C, dC)
        if spec.normalize:
            self.store_state(grads.n, dn)


def scans(x: Inputs, spec: Spec, m: Tensor) -> Iterator[Scan]:
    """Yield the scans of a call, from its inputs and the initial max state m."""
    for span in spans(x, spec.chunk_size):
        for group in groups(span.rows.stop - span.rows.start, x):
            yield Scan(x, spec, span, group, m)


class Chunkwise(Backend):
    """The chunkwise form, (36)-(56), in plain PyTorch."""

    name = "chunkwise"
    priority = 0
    kernels = ("segmented",)

    def unsupported(self, x: Inputs) -> str | None:
        """Return None: the backend runs every input."""
        return None

    def default_chunk_size(self, x: Inputs, kernel: str) -> int:
        """Return the steps of the largest block, so that a chunk is one block."""
        return TILE * MAX_TILES

    def details(self, x: Inputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """Return the steps of a tile and the tiles and groups of heads of a block."""
        return {"tile": TILE, "block": f"{MAX_TILES} tiles of {len(groups(1, x))} groups of heads"}

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Compute the forward, one scan after another."""
        C, n, m = initial_state(x, spec)
        none = C.new_empty(0)
        rows = self.stored_states(x, spec.chunk_size, spec.kernel) if spec.save else 0
        chunk_C = empty((rows, *C.shape[1:]), stored_dtype(x, spec), C.device) if spec.save else none
        chunk_n = n.new_empty(rows, *n.shape[1:]) if spec.save and spec.normalize else none.clone()
        h = empty(x.v.shape, x.v.dtype, x.v.device)
        d = torch.empty(x.log_f.shape, dtype=C.dtype, device=C.device) if spec.normalize and spec.save else none.clone()
        out = Outputs(h, C, n, m, d, chunk_C, chunk_n)
        work = Workspace(x.q, C.dtype)
        for scan in scans(x, spec, m.clone()):
            scan.forward(out, work)
        return out if spec.final_state else out._replace(C=none.clone(), n=none.clone(), m=none.clone())

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """Compute the gradients, one scan after another; each repeats the states inside its chunks."""
        C0, n0, m = initial_state(x, spec)
        dC = torch.zeros_like(C0) if dC is None else own(dC, C0.dtype)
        dn = torch.zeros_like(n0) if dn is None else own(dn, C0.dtype)
        dq, dk, dv = (empty(t.shape, t.dtype, t.device) for t in (x.q, x.k, x.v))
        dlog_i, dlog_f = (torch.empty(x.log_f.shape, dtype=C0.dtype, device=C0.device) for _ in range(2))
        grads = Grads(dq, dk, dv, dlog_i, dlog_f, dC, dn)
        work = Workspace(x.q, C0.dtype)
        for scan in scans(x, spec, m):
            scan.backward(out, dh, grads, work)
        return grads


BACKEND = Chunkwise()
__all__ = ["BACKEND", "DELTA_BACKEND"]
