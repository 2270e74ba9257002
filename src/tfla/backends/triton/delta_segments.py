"""The kernel "segmented" of the delta rule: the segments of each sequence side by side, where whole ones are too few.

A segment acts on the state of a head by a transition A (dqk x dqk) and by what it adds (docs/delta-rule.md):

    C_end = A C_start + S        dC_start = A^T dC_end + S'

    forward     delta_action_scan    S and A of each segment: its final state of the values [v | 0] from [0 | I]
                pass_delta_states    the states at the starts of segments
                delta_h_scan         h, from these states, with each segment as a packed sequence
    backward    initial_cotangent    S', the cotangents of the states at segment starts from the segments' own outputs
                pass_delta_states    the cotangents at the ends of segments
                then the launches of a backward, with each segment as a packed sequence

A sequence starts with its first segment from the given state, so that A of the first one is never needed.

Where the states of sequences are rows of a pool, delta_action_scan and pass_delta_states read them there, and
delta_h_scan, which comes after both, stores the state after the last segment of a sequence to its row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.base import FinalRows
from tfla.backends.delta import DeltaGrads, DeltaInputs, DeltaOutputs, DeltaSpec
from tfla.backends.gpu import results, sequences
from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_kernels import INTER, UPDATE, VECTORS
from tfla.backends.gpu.replay import LaunchRecorder, recorded_launches, recording
from tfla.backends.triton import delta, delta_kernels
from tfla.backends.triton.delta_kernels import gate_vector, tile_decay
from tfla.backends.triton.precise_products import add_split_product, scaled_product
from tfla.backends.triton.scan_tiles import (
    describable,
    load_tile,
    locate_scan,
    tile_access,
    wide_heads,
    without_unknown_options,
)

SLICE = 64  # columns of a transition that a product reads at once
MOST_PROGRAMS = 65535  # of the second axis of a grid
PASSED_COLUMNS = 32  # columns of dhv of a program that passes states


@triton.jit
def load_place(cu, sequence, sequences, segments):
    """Return where the state of a sequence is in a pool: the place of the final state of its last segment.

    Args:
        cu: the bounded offsets of segments, which the places of states follow, see `bound_sequences`.
        sequence: the number of the sequence.
        sequences: the number of segments of all sequences.
        segments: the number of segments of a sequence.
    """
    return tl.load(cu + 2 * sequences + (sequence + 1) * segments).to(tl.int64)


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "segments"])
def delta_action_scan(
    K, R, V, X, beta, gates, cu, given, added, transitions,
    sequences, T, tiles_of_head, H, GROUP, segments, kb, kt, kh, rb, rt, rh, vb, vt, vh, bb, bt, bh,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, GATED: tl.constexpr,
    READ_KEY: tl.constexpr, IS_VARLEN: tl.constexpr, USE_GIVEN: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Compute what each segment adds to the state, and its transition: a program has BV columns of either.

    The grid is (dhv / BV + dqk / BV, sequences * H), first the programs of what is added. S holds columns, transposed,
    (BV, BK). What the last segment of a sequence adds is left out, and the transition of the first one, and without
    LAST that of the last one. With WHOLE each segment is a sequence, and nothing is left out.

    Args:
        K, R, V, X, beta, gates, cu: as in `delta_h_scan`; the sequences are segments.
        given: the initial states of whole sequences, (sequences / segments, H, DK, DV); read with USE_GIVEN. With
            INDEXED a pool, see `load_place`.
        added: what segments add, (sequences, H, DK, DV) float32.
        transitions: their transitions, (sequences, H, DK, DK) float32.
        segments: the number of segments of a sequence.
    """
    VALUES: tl.constexpr = (DV + BV - 1) // BV
    part = tl.program_id(0)
    adds = part < VALUES
    col = tl.where(adds, part, part - VALUES) * BV
    h, first, steps, b, t0, tile0 = locate_scan(cu, sequences, T, H, L, IS_VARLEN)
    segment = tl.program_id(1) // H
    place = 0 if WHOLE else segment % segments
    needed = True if WHOLE else tl.where(adds, place + 1 < segments, place > 0)
    if not LAST:
        needed = needed & (place + 1 < segments)
    hx, hv = wide_heads(h, GROUP)
    k_at = tile_access(K + b * kb + t0 * kt + hx * kh, steps, DK, kt, L, BK, TMA)
    r_at = tile_access(R + b * rb + t0 * rt + hx * rh, steps, DK, rt, L, BK, TMA)
    v_at = tile_access(V + b * vb + t0 * vt + hv * vh, steps, DV, vt, L, BV, TMA)
    x_at = tile_access(X + (first * H + hv) * L, steps, L, H * L, L, L, TMA)
    beta += b * bb + t0 * bt + hv * bh
    gates += (hv * tiles_of_head + tile0) * VECTORS * L
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    S = tl.where((rv[:, None] == rk[None, :]) & (part >= VALUES), 1.0, 0.0)  # columns of 0, or of I
    in_state = (rv < DV)[:, None] & (rk < DK)[None, :] & adds
    if USE_GIVEN:
        row = (segment // segments).to(tl.int64)
        exists = in_state & (place == 0)
        if INDEXED:
            row = load_place(cu, segment // segments, sequences, segments)
            S = tl.where(exists & (row < -1), float("nan"), S)  # the pool lacks the row
            exists = exists & (row >= 0)
        at = (row * H + h) * DK * DV + rk[None, :] * DV + rv[:, None]
        S += tl.load(given + at, mask=exists, other=0.0).to(tl.float32)
    r = tl.arange(0, L)
    tiles = tl.where(needed, tl.cdiv(steps, L), 0).to(tl.int32)
    for step in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        t = step * L
        gate = gates + t * VECTORS
        k = load_tile(k_at, t, 0, steps, DK, kt, L, BK, TMA)  # (L, BK)
        read = k
        if READ_KEY:
            read = load_tile(r_at, t, 0, steps, DK, rt, L, BK, TMA)  # (L, BK)
        v = load_tile(v_at, t, col, steps, DV, vt, L, BV, TMA)  # (L, BV)
        x = load_tile(x_at, t, 0, steps, L, H * L, L, L, TMA)  # (L, L)
        beta_t = tl.load(beta + (t + r) * bt, t + r < steps, 0.0).to(tl.float32)  # (L)
        a = gate_vector(gate, r, INTER, L, GATED)  # (L)
        w = gate_vector(gate, r, UPDATE, L, GATED)  # (L)
        # (1) R^T <- V^T - (C^T r^T) a, (BV, L), with V = 0 for transitions
        values = tl.where(adds, tl.trans(v).to(tl.float32), 0.0)
        res = values - tl.dot(S.to(k.dtype), tl.trans(read), input_precision=PRECISION) * a[None, :]
        # (2) E^T <- R^T - (B R)^T X^T, (BV, L)
        res -= scaled_product(res * beta_t[None, :], tl.trans(x), PRECISION)
        # (3) C^T <- g C^T + (w B E)^T k, (BV, BK)
        S = S * tile_decay(gate, L, GATED)
        S = add_split_product(S, res * (w * beta_t)[None, :], k, PRECISION)
    row = (segment.to(tl.int64) * H + h) * DK + rk[None, :]
    # What is never read is stored, too, so that no result has memory that was not written.
    tl.store(added + row * DV + rv[:, None], S, mask=in_state)
    in_transition = (rv < DK)[:, None] & (rk < DK)[None, :] & (part >= VALUES)
    tl.store(transitions + row * DK + rv[:, None], S, mask=in_transition)


@triton.jit(do_not_specialize=["segments", "H"])
def pass_delta_states(
    transitions, states, given, cu, segments, H,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SLICE: tl.constexpr,
    REVERSE: tl.constexpr, USE_GIVEN: tl.constexpr, PRECISION: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state at its start, or with REVERSE by the cotangent at its end.

    The first segment of a sequence, which starts from the given state, adds its final state.

    Args:
        transitions: (sequences segments, H, DK, DK) float32; those of first segments are not read.
        states: (sequences segments, H, DK, DV) float32. What the last segment of each scan adds is not read.
        given: the initial states of the sequences, or with REVERSE the cotangents of their final states,
            (sequences, H, DK, DV); read with USE_GIVEN, else zeros. With INDEXED a pool.
        cu: the offsets of segments, read with INDEXED, see `load_place`.

    The grid is (DV / BV, sequences * H).
    """
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rk = tl.arange(0, BK)
    rv = tl.program_id(0) * BV + tl.arange(0, BV)
    rs = tl.arange(0, SLICE)
    at = rk[:, None] * DV + rv[None, :]
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if USE_GIVEN:
        row, exists = b, inside
        if INDEXED:
            row = load_place(cu, b, tl.num_programs(1) // H * segments, segments)
            exists = inside & (row >= 0)
        S = tl.load(given + (row * H + h) * DK * DV + at, mask=exists, other=0.0).to(tl.float32)
        if INDEXED:
            S = tl.where(row < -1, float("nan"), S)  # the pool lacks the row
    for c in range(0, segments):
        place = segments - 1 - c if REVERSE else c
        segment = (b * segments + place) * H + h
        state = states + segment * DK * DV
        more = c + 1 < segments
        acc = tl.load(state + at, mask=inside & more, other=0.0)
        tl.debug_barrier()
        tl.store(state + at, S, mask=inside)
        tl.debug_barrier()  # all threads read below what each has stored
        carried = more & (place > 0)
        for j in range(0, tl.where(carried, DK, 0), SLICE):
            rj = j + rs
            if REVERSE:  # rows of A, as columns of A^T
                A_at = rj[None, :] * DK + rk[:, None]
            else:
                A_at = rk[:, None] * DK + rj[None, :]
            A = tl.load(transitions + segment * DK * DK + A_at, mask=(rk < DK)[:, None] & (rj < DK)[None, :], other=0.0)
            rows = tl.load(
                state + rj[:, None] * DV + rv[None, :], mask=(rj < DK)[:, None] & (rv < DV)[None, :], other=0.0
            )
            acc = tl.dot(A, rows, acc, input_precision=PRECISION)
        S = acc


class Segments(NamedTuple):
    """A call whose segments are packed sequences."""

    x: DeltaInputs  # the segments as packed sequences; C are the states before whole sequences, or None
    batch: int  # B
    segments: int  # the number of segments of each sequence

    @staticmethod
    def of(x: DeltaInputs, steps: int) -> Segments:
        """Return a dense call with its sequences cut into segments of so many steps."""
        B, T = x.v.shape[:2]
        count = count_segments(B, T, x.v.shape[2], steps)
        q, k, v, beta, log_f, read_key = (None if t is None else as_one_row(t) for t in x[:6])
        offsets = offsets_of(x.q.device, B, T, steps)
        return Segments(DeltaInputs(q, k, v, beta, log_f, read_key, None, None, x.C, offsets), B, count)  # type: ignore[arg-type]

    def as_batch(self, t: Tensor) -> Tensor:
        """Return a view (B, T, ...) of a tensor (1, B T, ...)."""
        return t.view(self.batch, -1, *t.shape[2:])

    def states_of_sequences(self, t: Tensor, index: int) -> Tensor:
        """Return the states of the segment `index` of each sequence, (B, H, ...), from those of all segments."""
        return t.view(self.batch, self.segments, *t.shape[1:])[:, index]


def count_segments(batch: int, T: int, heads: int, steps: int) -> int:
    """Return the number of segments of a sequence.

    Raises:
        ValueError: a grid cannot have so many programs.
    """
    count = ceil_div(T, steps)
    if batch * count * heads > MOST_PROGRAMS:
        raise ValueError(
            f"chunk_size: got {steps}, which makes {batch * count} segments of {heads} heads, expected at most "
            f"{MOST_PROGRAMS} segments times heads"
        )
    return count


def as_one_row(x: Tensor) -> Tensor:
    """Return (B, T, ...) as (1, B T, ...), with a dense last dim."""
    return x if x.shape[0] == 1 else x.reshape(1, -1, *x.shape[2:])


@functools.cache  # without a limit, because a captured graph reads the offsets as long as it is replayed
def offsets_of(device: torch.device, batch: int, T: int, steps: int) -> Tensor:
    """Return the offsets of segments. They are copied to the device once, and not while a graph is captured."""
    starts = [row * T + at for row in range(batch) for at in range(0, T, steps)]
    with torch.inference_mode(False):
        return torch.tensor([*starts, batch * T], dtype=torch.int32, device=device)


class Stored(NamedTuple):
    """The tensors that a forward stores of its segments, in this order in the memory of one tensor."""

    starts: Tensor  # (N, H, dqk, dhv) float32, the states at their starts
    transitions: Tensor  # (N, H, dqk, dqk) float32
    norms: Tensor | None  # (2, 1, B T, H) float32, 1 / |q| and 1 / |k|, where the kernels normalize q and k

    @staticmethod
    def shapes(x: DeltaInputs, spec: DeltaSpec) -> list[tuple[int, ...]]:
        """Return the shapes of what there is."""
        (B, T, H, V), K, N = x.v.shape, x.q.shape[3], x.sequences
        return [(N, H, K, V), (N, H, K, K), *[(2, B, T, H)] * spec.normalize_qk]

    @staticmethod
    def new(recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec) -> Tensor:
        """Allocate the tensor."""
        if spec.normalize_qk:
            return recorder.new(sum(map(math.prod, Stored.shapes(x, spec))))
        return recorder.new(x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3] + x.q.shape[3])

    @staticmethod
    def within(recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec, memory: Tensor) -> Stored:
        """Return what is in the memory of the tensor."""
        shapes = Stored.shapes(x, spec)
        ends = itertools.accumulate(map(math.prod, shapes), initial=0)
        starts, transitions, *norms = (recorder.reuse(memory, at, shape) for at, shape in zip(ends, shapes))  # noqa: B905
        return Stored(starts, transitions, norms[0] if norms else None)


def launch_action(
    ctx: delta.DeltaContext, gates: Tensor, X: Tensor, given: Tensor | None, added: Tensor, transitions: Tensor,
    segments: int,
) -> None:  # fmt: skip
    """Launch `delta_action_scan`; its arguments are named as there, and with 0 segments it is WHOLE.

    Where the context has rows, `given` is the pool of the final states.
    """
    base, x, tiles = ctx.base, ctx.x, ctx.config.h
    programs = ceil_div(base.V, tiles.split) + ceil_div(base.K, tiles.split)
    tma = ctx.config.descriptors and describable(x.k, ctx.read_key, x.v)
    base.launch(delta_action_scan, (programs, x.sequences * base.H),
        x.k, ctx.read_key, x.v, X, ctx.beta, gates, base.cu_seqlens, gates if given is None else given, added,
        transitions, x.sequences, base.T, base.tiles, base.H, base.group, segments, *time_strides(x.k),
        *time_strides(ctx.read_key), *time_strides(x.v), *time_strides(ctx.beta), BV=tiles.split,
        USE_GIVEN=given is not None, LAST=ctx.spec.save or not segments, WHOLE=not segments, TMA=tma,
        STAGES=tiles.stages, INDEXED=base.rows is not None, num_warps=tiles.num_warps, **ctx.constants,
    )  # fmt: skip


def _launch_pass(
    ctx: delta.DeltaContext, transitions: Tensor, states: Tensor, given: Tensor | None, segments: int, *, reverse: bool
) -> None:
    """Launch `pass_delta_states`; its arguments are named as there."""
    base, BK = ctx.base, power_of_two(ctx.base.K)
    columns = min(PASSED_COLUMNS, power_of_two(base.V))
    base.launch(pass_delta_states, (ceil_div(base.V, columns), ctx.x.sequences // segments * base.H),
        transitions, states, transitions if given is None else given, base.cu_seqlens, segments, base.H, DK=base.K,
        DV=base.V, BK=BK, BV=columns, SLICE=min(SLICE, BK), REVERSE=reverse, USE_GIVEN=given is not None,
        PRECISION="ieee" if ctx.x.q.dtype == torch.float32 else "tf32x3", INDEXED=base.rows is not None,
        num_warps=8 if BK > 64 else 4,
    )  # fmt: skip


class SegmentRows(NamedTuple):
    """The rows of a call of segments whose states before whole sequences are rows of a pool."""

    starts: Tensor  # (N,) int: the rows of the states at segment starts, which are the numbers of the segments
    given: Tensor  # (N,) int: the rows that are read, for the last segment of each sequence; -1 for the others
    pool: Tensor | None = None  # the pool that gets the final states, or None where it is the one that is read
    ends: Tensor | None = None  # (N,) int: the rows of that pool, like `given`

    @staticmethod
    def of(rows: Tensor, segments: int, final_rows: FinalRows | None) -> SegmentRows:
        """Return the rows of segments from those of sequences, (B,)."""

        def at_ends(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows[:, None], (segments - 1, 0), value=-1).flatten()

        given = at_ends(rows)
        starts = torch.arange(len(given), device=rows.device)
        return SegmentRows(starts, given, *(() if final_rows is None else (final_rows.C, at_ends(final_rows.rows))))

    def final_rows(self, pool: Tensor) -> FinalRows:
        """Return the pool that gets the final states and its rows, from the pool that is read."""
        return (
            FinalRows(pool, self.given) if self.pool is None or self.ends is None else FinalRows(self.pool, self.ends)
        )


def context(
    recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec, C: Tensor | None = None,
    rows: SegmentRows | None = None, norms: Tensor | None = None,
) -> delta.DeltaContext:  # fmt: skip
    """Return the context of a call of segments from the states C before them, or None; with `rows`, x.C is the pool.

    `norms` are those of :class:`Stored`, which a forward fills; None where the kernels do not normalize q and k.
    """
    final_rows = None if rows is None or x.C is None else rows.final_rows(x.C)
    x = x._replace(C=C)
    base, beta = delta.launch_context(recorder, x, spec, None if rows is None else rows.starts, final_rows)
    return delta.context(base, x, spec, beta, norms)


class ForwardKernels(NamedTuple):
    """The launchers that a backend chooses for a forward; their arguments are those of :data:`FORWARD`."""

    solve: delta.Solve
    action: Callable[[delta.DeltaContext, Tensor, Tensor, Tensor | None, Tensor, Tensor, int], None]
    h: delta.LaunchH


FORWARD = ForwardKernels(delta_kernels.launch_solve, launch_action, delta_kernels.launch_h)


def forward(
    ctx: delta.DeltaContext, given: Tensor | None, segments: int, kernels: ForwardKernels, starts: Tensor,
    transitions: Tensor, *, rows: SegmentRows | None = None,
) -> DeltaOutputs:  # fmt: skip
    """Launch the forward of segments.

    Args:
        ctx: The context of the segments without states before them, or with rows from `starts`.
        given: The initial states of whole sequences, (B, H, dqk, dhv), or None. With rows, the pool.
        segments: The number of segments of a sequence.
        kernels: The launchers.
        starts: Output for the states at the starts of segments, (segments of all, H, dqk, dhv) float32.
        transitions: Output for their transitions, (segments of all, H, dqk, dqk) float32.
        rows: The rows of the context, or None.

    Returns:
        What a forward returns, with the final states of all segments, unless there are rows, and without chunk_C.
    """
    x, spec, base = ctx.x, ctx.spec, ctx.base
    h = base.new(*x.v.shape, dtype=x.v.dtype)
    E = base.new(*x.v.shape, dtype=x.v.dtype) if spec.save else None
    ctx = replace(ctx, base=sequences.bound(base, h, *(() if E is None else (E,))))
    final = None
    if spec.final_state:
        final = base.new(x.sequences, base.H, base.K, base.V) if base.rows is None else base.final_pool
    gates = ctx.gates()
    if base.rows is None:
        given = results.dense(base, given)
    if rows is None or rows.pool is None or given is None:
        reads = ctx
    else:  # the kernels find the rows that they read where those of final states are for others
        reads = replace(ctx, base=sequences.bound(replace(base, final_rows=FinalRows(given, rows.given))))
    X = kernels.solve(ctx, gates)
    kernels.action(reads, gates, X, given, starts, transitions, segments)
    _launch_pass(reads, transitions, starts, given, segments, reverse=False)
    kernels.h(ctx, gates, X, h, E, starts, final)
    none = base.placeholder(0)
    C = none if final is None or base.rows is not None else final
    return DeltaOutputs(h, C, none if E is None else E, X if spec.save else none, none)


class BackwardKernels(NamedTuple):
    """The launchers that a backend chooses for a backward."""

    backward: delta.Backward
    initial_cotangent: delta.InitialCotangent  # of segments, from their own outputs


BACKWARD = BackwardKernels(delta.backward, delta.initial_cotangent)


def backward(
    contexts: tuple[delta.DeltaContext, delta.DeltaContext], E: Tensor, X: Tensor, transitions: Tensor, dh: Tensor,
    dC: Tensor | None, segments: int, kernels: BackwardKernels,
) -> DeltaGrads:  # fmt: skip
    """Launch the backward of segments.

    Args:
        contexts: The context of the segments without states before them, and with those that the forward stored.
        E, X, transitions: What the forward stored.
        dh: The cotangent of h, (1, B T, H, dhv).
        dC: The cotangents of the final states of whole sequences, (B, H, dqk, dhv), or None.
        segments: The number of segments of a sequence.
        kernels: The launchers.
    """
    ctx, from_starts = contexts
    ends = kernels.initial_cotangent(ctx, E, X, dh)
    _launch_pass(ctx, transitions, ends, results.dense(ctx.base, dC), segments, reverse=True)
    return kernels.backward(from_starts, E, X, dh, ends)


def run_forward(
    x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels = FORWARD, rows: Tensor | None = None,
    final_rows: FinalRows | None = None,
) -> DeltaOutputs:  # fmt: skip
    """Record or replay the launches of a forward with segments of `spec.chunk_size` steps.

    With `rows`, (B,), x.C is a pool that has these rows, and the final states are written there alone, or to
    `final_rows`.
    """
    cut = Segments.of(x, spec.chunk_size)
    more: tuple[Tensor | None, ...] = () if rows is None else SegmentRows.of(rows, cut.segments, final_rows)
    given = *cut.x, *more
    signature = delta.call_signature(("segmented forward", kernels, cut.segments), cut.x, spec, *more)
    found: Any = recorded_launches(signature)
    if found is not None:
        out = DeltaOutputs(*found(given))
    else:
        with recording(signature, given) as recorder:
            own = DeltaInputs(*recorder.given[: len(x)])  # type: ignore[arg-type]
            of_rows: Any = SegmentRows(*recorder.given[len(x) :]) if more else None  # type: ignore[arg-type]
            memory = Stored.new(recorder, own, spec)
            stored = Stored.within(recorder, own, spec, memory)
            ctx = context(recorder, own, spec, None if of_rows is None else stored.starts, of_rows, stored.norms)
            out = forward(ctx, own.C, cut.segments, kernels, stored.starts, stored.transitions, rows=of_rows)
            out = out._replace(chunk_C=memory if spec.save else out.chunk_C)
            recorder.results = out
    # A copy, since a view would keep the states of all segments.
    C = cut.states_of_sequences(out.C, -1).clone() if spec.final_state and rows is None else out.C
    E = cut.as_batch(out.E) if spec.save else out.E
    X = cut.as_batch(out.X) if spec.save else out.X
    return DeltaOutputs(cut.as_batch(out.h), C, E, X, out.chunk_C)


def run_backward(
    x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec,
    kernels: BackwardKernels = BACKWARD,
) -> DeltaGrads:  # fmt: skip
    """Record or replay the launches of a backward with segments of `spec.chunk_size` steps."""
    cut = Segments.of(x, spec.chunk_size)
    given = *cut.x, as_one_row(out.E), as_one_row(out.X), out.chunk_C, as_one_row(dh), dC
    signature = delta.call_signature(("segmented backward", kernels, cut.segments), cut.x, spec, *given[len(x) :])
    found: Any = recorded_launches(signature)
    if found is not None:
        grads = DeltaGrads(*found(given))
    else:
        with recording(signature, given) as recorder:
            inputs = DeltaInputs(*recorder.given[: len(x)])  # type: ignore[arg-type]
            E, X, memory, cotangent, of_final = recorder.given[len(x) :]
            assert E is not None
            assert X is not None
            assert memory is not None
            assert cotangent is not None
            starts, transitions, norms = Stored.within(recorder, inputs, spec, memory)
            contexts = (
                context(recorder, inputs, spec, norms=norms), context(recorder, inputs, spec, starts, norms=norms)
            )  # fmt: skip
            grads = backward(contexts, E, X, transitions, cotangent, of_final, cut.segments, kernels)
            recorder.results = grads  # type: ignore[assignment]
    per_step = [None if t is None else cut.as_batch(g) for g, t in zip(grads, x[:6], strict=False)]  # type: ignore[arg-type]
    first = None if x.C is None or grads.C is None else cut.states_of_sequences(grads.C, 0)
    return DeltaGrads(*per_step, A_log=None, dt_bias=None, C=first)  # type: ignore[arg-type,misc]


def run_action(x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels = FORWARD) -> tuple[Tensor, Tensor]:
    """Return the transitions of whole sequences and what these add to the state, by recorded launches."""
    x = x._replace(C=None)
    signature = delta.call_signature(("action", kernels), x, spec)
    found: Any = recorded_launches(signature)
    if found is None:
        with recording(signature, x) as recorder:
            ctx = context(recorder, DeltaInputs(*recorder.given), spec)  # type: ignore[arg-type]
            base = ctx.base
            ctx = replace(ctx, base=sequences.bound(base))
            gates = ctx.gates()
            X = kernels.solve(ctx, gates)
            added, transitions = (base.new(ctx.x.sequences, base.H, base.K, d) for d in (base.V, base.K))
            kernels.action(ctx, gates, X, None, added, transitions, 0)
            recorder.results = transitions, added
        return transitions, added
    transitions, added = found(x)
    return transitions, added
