"""The chunkwise backend of the delta rule in plain PyTorch, for CPUs and every device that PyTorch runs on.

As in the scalar-gated operator of this package, the state before each chunk is stored for the backward, and a chunk is
computed in blocks of tiles of 64 steps (:mod:`.delta_block`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.base import TILE, own
from tfla.backends.chunkwise import delta_block
from tfla.backends.chunkwise.channel_decays import ChannelDecays
from tfla.backends.chunkwise.layout import MAX_TILES, Group, Part, Span, groups, parts, spans
from tfla.backends.chunkwise.step_decays import StepDecays
from tfla.backends.chunkwise.workspace import empty
from tfla.backends.delta import (
    DeltaBackend,
    DeltaGrads,
    DeltaInputs,
    DeltaOutputs,
    DeltaSpec,
    Saved,
    stored_rows,
)


def initial_state(x: DeltaInputs) -> Tensor:
    """Return the initial state as a new tensor of the accumulators' dtype; zeros where none is given."""
    if x.C is not None:
        return own(x.C, x.acc_dtype)
    shape = (x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return torch.zeros(shape, dtype=x.acc_dtype, device=x.q.device)


class Scan:
    """The scan over the chunks of one span for one group of heads, in both directions."""

    def __init__(self, x: DeltaInputs, spec: DeltaSpec, span: Span, group: Group) -> None:
        self.spec, self.span, self.group, self.dtype = spec, span, group, x.acc_dtype
        rows = span.rows
        self.q, self.k, self.v = x.q[rows], x.k[rows], x.v[rows]
        self.beta = None if x.beta is None else x.beta[rows].unsqueeze(-1)
        self.log_f = None if x.log_f is None else x.log_f[rows]
        self.channel_gates = x.channel_gates
        self.read_key = None if x.read_key is None else x.read_key[rows]
        self.states = span.states.start + group.rows.start, span.states.start + group.rows.stop

    def of_group(self, states: Tensor) -> Tensor:
        """Return the group's rows and heads of (sequences, H, ...), a view."""
        return states[self.states[0] : self.states[1], self.group.heads]

    def chunks(self) -> list[tuple[int, int, list[int]]]:
        """Return (first step, one past the last step, rows of the stored states) of each chunk."""
        a, b, c = self.span.start, self.span.stop, self.spec.chunk_size
        return [(t, min(t + c, b), [s + n for s in self.span.chunk_rows]) for n, t in enumerate(range(a, b, c))]

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Return the blocks of a chunk."""
        return parts(start, stop, TILE)

    def of_heads(self, x: Tensor, part: Part) -> Tensor:
        """Return a block (n, N, L, d) of a tensor with the heads of v; L is filled up to a power of 2 by zeros."""
        return _filled(self.group.v(x, part, self.dtype)).contiguous()

    def of_shared_heads(self, x: Tensor, part: Part) -> Tensor:
        """Return a block (n, N, L, d) of a tensor with the heads of q and k."""
        return _filled(self.group.qk(x, part, self.dtype)).contiguous()

    def block(self, part: Part) -> delta_block.Block:
        """Return the inputs of a block. The steps that fill it up have no write, no decay and no query."""
        q, k = self.of_shared_heads(self.q, part), self.of_shared_heads(self.k, part)
        v = self.of_heads(self.v, part)
        beta = v.new_ones(v.shape[:-1]) if self.beta is None else self.of_heads(self.beta, part).squeeze(-1)
        decays: delta_block.Decays
        if self.log_f is None:
            decays = StepDecays(v.new_zeros(v.shape[:-1]), k)
        elif self.channel_gates:
            decays = ChannelDecays(self.of_heads(self.log_f, part), k)
        else:
            decays = StepDecays(self.of_heads(self.log_f.unsqueeze(-1), part).squeeze(-1), k)
        read_key = None
        if self.spec.correct:
            read_key = k if self.read_key is None else self.of_shared_heads(self.read_key, part)
        return delta_block.Block(q, k, v, beta, read_key, decays, self.spec.scale, self.spec.read_before_decay)

    def store(self, out: Tensor, part: Part, x: Tensor) -> None:
        """Store a block (n, N, L, d) to a tensor with the heads of v."""
        self.group.store(out[self.span.rows], part, x[:, :, : part.L])

    def store_shared(self, out: Tensor, part: Part, x: Tensor) -> None:
        """Store a block (n, N, L, d) to a tensor with the heads of q and k, summed over the heads that share one."""
        self.group.store_qk(out[self.span.rows], part, x[:, :, : part.L])

    def forward(self, out: DeltaOutputs) -> None:
        """Compute this scan's part of `out`; `out.C` has the initial state before and the final one after the call."""
        C = self.of_group(out.C).flatten(0, 1).clone()
        for start, stop, chunk_rows in self.chunks():
            if self.spec.save:
                self.group.store_state(out.chunk_C, chunk_rows, C)
            for part in self.parts(start, stop):
                h, E, X = delta_block.forward(self.block(part), C)
                self.store(out.h, part, h)
                if self.spec.save and X is not None:
                    self.store(out.E, part, E)
                    self.store(out.X, part, F.pad(X, (0, TILE - X.shape[-1])))
        self.store_state(out.C, C)

    def store_state(self, states: Tensor, x: Tensor) -> None:
        """Store (N, ...) to the group's part of (sequences, H, ...)."""
        target = self.of_group(states)
        target.copy_(x.view(target.shape))

    def backward(self, out: DeltaOutputs, dh: Tensor, grads: DeltaGrads, dC_all: Tensor) -> None:
        """Compute this scan's part of `grads`, from the last chunk to the first.

        The states before the blocks of a chunk are computed again from the stored one. `dC_all` has the cotangents of
        the final states before the call and those of the initial states after it.
        """
        dC = self.of_group(dC_all).flatten(0, 1).clone()
        for start, stop, chunk_rows in reversed(self.chunks()):
            C = self.group.state(out.chunk_C, chunk_rows).to(self.dtype)
            blocks = []  # each with its inputs, its errors and the state before it
            for part in self.parts(start, stop):
                x = self.block(part)
                E = self.of_heads(out.E[self.span.rows], part) if self.spec.correct else x.v
                blocks.append((part, x, E, C))
                if part.stop < stop:
                    C = delta_block.final_state(x, E, C)
            for part, x, E, C in reversed(blocks):
                X = self.correction(out, part, x)
                do = self.of_heads(dh[self.span.rows], part)
                self.store_gradients(grads, part, delta_block.backward(x, E, X, do, C, dC))
        self.store_state(dC_all, dC)

    def initial_cotangent(self, out: DeltaOutputs, dh: Tensor, dC_all: Tensor) -> None:
        """Add to `dC_all`, which is zero, the cotangents of this scan's initial states from those of h."""
        dC = self.of_group(dC_all).flatten(0, 1).clone()
        for start, stop, _ in reversed(self.chunks()):
            for part in reversed(list(self.parts(start, stop))):
                x = self.block(part)
                X = self.correction(out, part, x)
                delta_block.cotangent(x, X, self.of_heads(dh[self.span.rows], part), dC)
        self.store_state(dC_all, dC)

    def correction(self, out: DeltaOutputs, part: Part, x: delta_block.Block) -> Tensor | None:
        """Return X of a block, None without a correction."""
        return self.of_heads(out.X[self.span.rows], part)[..., : x.v.shape[2]] if self.spec.correct else None

    def store_gradients(self, grads: DeltaGrads, part: Part, found: delta_block.Gradients) -> None:
        """Store the gradients of a block."""
        dk = found.k
        if found.read_key is not None:
            if grads.read_key is None:
                dk = dk + found.read_key
            else:
                self.store_shared(grads.read_key, part, found.read_key)
        self.store_shared(grads.q, part, found.q)
        self.store_shared(grads.k, part, dk)
        self.store(grads.v, part, found.v)
        if grads.beta is not None:
            self.store(grads.beta.unsqueeze(-1), part, found.beta.unsqueeze(-1))
        if grads.log_f is not None:
            per_channel = self.channel_gates
            log_f = grads.log_f if per_channel else grads.log_f.unsqueeze(-1)
            self.store(log_f, part, found.log_f if per_channel else found.log_f.unsqueeze(-1))


def _filled(x: Tensor) -> Tensor:
    """Return (n, N, L, d) with L filled up to a power of 2 by zeros."""
    L = x.shape[2]
    return F.pad(x, (0, 0, 0, (1 << (L - 1).bit_length()) - L)) if L & (L - 1) else x


def scans(x: DeltaInputs, spec: DeltaSpec) -> Iterator[Scan]:
    """Yield the scans of a call."""
    for span in spans(x, spec.chunk_size):
        for group in groups(span.rows.stop - span.rows.start, x):
            yield Scan(x, spec, span, group)


class ChunkwiseDelta(DeltaBackend):
    """The delta rule in tiles, in plain PyTorch."""

    name = "chunkwise"
    priority = 0
    kernels = ("segmented",)

    def unsupported(self, x: DeltaInputs) -> str | None:
        """Return None: the backend runs every input."""
        return None

    def default_chunk_size(self, x: DeltaInputs, kernel: str) -> int:
        """Return the steps of the largest block, so that a chunk is one block."""
        return TILE * MAX_TILES

    def details(self, x: DeltaInputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """Return the steps of a tile and the tiles and groups of heads of a block."""
        return {"tile": TILE, "block": f"{MAX_TILES} tiles of {len(groups(1, x))} groups of heads"}

    def saved(self, x: DeltaInputs, correct: bool, chunk_size: int, kernel: str) -> Saved:
        """Return E, X and the states of chunks, in the dtype of the arithmetic."""
        B, T, H, V = x.v.shape
        dtype = x.acc_dtype
        E, X = ((B, T, H, V), (B, T, H, TILE)) if correct else ((0,), (0,))
        return Saved((E, dtype), (X, dtype), ((stored_rows(x, chunk_size), H, x.q.shape[3], V), dtype))

    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        """Compute the forward, one scan after another."""
        C, device = initial_state(x), x.q.device
        h = empty(x.v.shape, x.v.dtype, device)
        none = C.new_empty(0)
        stored = [none, none, none]
        if spec.save:
            stored = [empty(*like, device) for like in self.saved(x, spec.correct, spec.chunk_size, spec.kernel)]
        out = DeltaOutputs(h, C, *stored)
        for scan in scans(x, spec):
            scan.forward(out)
        return out if spec.final_state else out._replace(C=none)

    def backward(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec) -> DeltaGrads:
        """Compute the gradients, one scan after another; each repeats the states inside its chunks."""
        shape = (x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3])
        dC = dh.new_zeros(shape, dtype=x.acc_dtype) if dC is None else own(dC, x.acc_dtype)

        def like(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
            return None if t is None else empty(t.shape, dtype or t.dtype, t.device)

        dbeta, dlog_f = like(x.beta, x.acc_dtype), like(x.log_f, x.acc_dtype)
        dq, dk, dv = (empty(t.shape, t.dtype, t.device) for t in (x.q, x.k, x.v))
        grads = DeltaGrads(dq, dk, dv, dbeta, dlog_f, like(x.read_key), None, None, None)
        for scan in scans(x, spec):
            scan.backward(out, dh, grads, dC)
        return grads._replace(C=dC)

    def initial_cotangent(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, spec: DeltaSpec) -> Tensor:
        """Compute the cotangents of the initial states by the products that need no states."""
        dC = dh.new_zeros((x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]), dtype=x.acc_dtype)
        for scan in scans(x, spec):
            scan.initial_cotangent(out, dh, dC)
        return dC


DELTA_BACKEND = ChunkwiseDelta()
