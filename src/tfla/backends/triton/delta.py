"""The launches of the delta rule with one forget gate a step: one forward, one backward.

The equations are those of :mod:`.delta_kernels` and docs/delta-rule.md. What these launches share with those of the
mLSTM, above all the gate vectors and the gates' gradients, takes a :class:`.LaunchContext`: for it the call is one of
linear attention without an input gate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import TILE, FinalRows, Inputs, Replay, Spec, static
from tfla.backends.delta import DeltaGrads, DeltaInputs, DeltaOutputs, DeltaSpec
from tfla.backends.gpu import gate_gradients, gate_kernels, reductions, results, sequences
from tfla.backends.gpu.checkpoints import checkpoint_shape
from tfla.backends.gpu.config import TileConfig, architecture, ceil_div, kernel_config, power_of_two
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.replay import LaunchRecorder, fill_with_ones, recorded_launches, recording
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE
from tfla.backends.triton import channel_rule, delta_kernels

CHECKPOINT_STEPS = 256


@dataclass(frozen=True, eq=False)
class DeltaConfig:
    """The configuration of the scans of one call; compared by identity."""

    h: TileConfig  # of delta_h_scan: a program has `block` columns of dhv
    dv: TileConfig  # of delta_dv_scan: the same
    dq_dk: TileConfig  # of delta_dq_dk_scan: a program has `split` rows of dqk, in `blocks` blocks of `block` columns
    descriptors: bool  # whether the scans use TMA descriptors, where strides allow them
    wgmma: bool  # whether delta_dq_dk_scan is arranged for Hopper's wgmma


@functools.cache
def delta_config(dqk: int, dhv: int, arch: int, read_key: bool = False) -> DeltaConfig:
    """Return the configuration for these head dims on a GPU of this compute capability, 90 for 9.0.

    A read key apart from k is one more tile that a stage of the scans holds in shared memory.
    """
    K, V = power_of_two(dqk), power_of_two(dhv)
    block, blocks = min(V, 128), ceil_div(V, 128)
    wide = K > 128  # then a state has many rows
    if arch == 90:
        dv = min(V, 64 if wide else 128)
        stages = 1 if wide and read_key else 2
        return DeltaConfig(
            h=_columns(min(V, 64), num_warps=8 if wide else 4, stages=stages),
            dv=_columns(dv, num_warps=8 if wide or dv == 128 else 4, stages=stages),
            dq_dk=TileConfig(split=min(K, 64), block=block, blocks=blocks, num_warps=4 * blocks, stages=2),
            descriptors=dqk % 8 == 0 and dhv % 8 == 0,
            wgmma=True,
        )
    columns = _columns(min(V, 16 if wide else 32), num_warps=8, stages=1)
    return DeltaConfig(
        h=columns,
        dv=columns,
        dq_dk=TileConfig(split=min(K, 32 // blocks), block=block, blocks=blocks, num_warps=8, stages=1),
        descriptors=False,
        wgmma=False,
    )


def _columns(columns: int, num_warps: int, stages: int) -> TileConfig:
    """Return the tiles of a scan whose programs share the columns of dhv."""
    return TileConfig(split=columns, block=columns, blocks=1, num_warps=num_warps, stages=stages)


@dataclass(frozen=True, kw_only=True)
class DeltaContext:
    """The sizes, options and tensors that all launches of one forward or backward share."""

    base: LaunchContext  # sizes and recorder
    x: DeltaInputs
    spec: DeltaSpec
    config: DeltaConfig
    beta: Tensor  # (B, T, H); ones where the call has none
    # (2, B, T, H) float32, 1 / |q| and 1 / |k|, where the kernels divide q and k by their norms.
    norms: Tensor | None = None

    @property
    def read_key(self) -> Tensor:
        """The read keys, (B, T, Hq, dqk)."""
        return self.x.k if self.x.read_key is None else self.x.read_key

    @property
    def norms_apart(self) -> tuple[Tensor, Tensor] | None:
        """1 / |k| and 1 / |q|, (1, B, T, H) each, or None."""
        rows = self.base.recorder.rows
        return None if self.norms is None else (rows(self.norms, 1, 2), rows(self.norms, 0, 1))

    @property
    def gated(self) -> bool:
        """True if gates decay the state, so that there are gate vectors."""
        return self.x.log_f is not None

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that delta_h_scan and delta_dv_scan share."""
        return {
            "DK": self.base.K, "DV": self.base.V, "BK": power_of_two(self.base.K), "L": self.base.L,
            "GATED": self.gated, "READ_KEY": self.x.read_key is not None, "IS_VARLEN": self.base.packed,
            "PRECISION": self.base.precision,
        }  # fmt: skip

    def gates(self) -> Tensor:
        """Return the gate vectors, or beta, which no kernel reads as gate vectors, where the state does not decay."""
        return gate_kernels.launch(self.base) if self.gated else self.beta


def launch_context(
    recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec, rows: Tensor | None = None,
    final_rows: FinalRows | None = None,
) -> tuple[LaunchContext, Tensor]:  # fmt: skip
    """Return the sizes of a call for what it shares with the mLSTM, and beta, (B, T, H).

    `rows` and `final_rows` are those of the :class:`.LaunchContext`.
    """
    beta = recorder.do(fill_with_ones, recorder.new(*x.v.shape[:3])) if x.beta is None else x.beta
    log_f = beta if x.log_f is None or x.channel_gates else x.log_f
    as_linear_attention = Inputs(x.q, x.k, x.v, None, log_f, x.C, None, None, x.cu_seqlens)
    offsets = beta if x.cu_seqlens is None else x.cu_seqlens
    base = LaunchContext(
        recorder=recorder,
        x=as_linear_attention,
        spec=Spec(
            scale=1.0, normalize=False, normalizer_grad=False, chunk_size=DEFERRED_CHUNK_SIZE, kernel=spec.kernel,
            save=spec.save, final_state=spec.final_state,
        ),
        config=kernel_config(as_linear_attention),
        K=x.q.shape[3],
        V=x.v.shape[3],
        L=TILE,
        segment_steps=max(int(x.q.shape[1]), 1),
        segments=x.sequences,
        checkpoint_steps=CHECKPOINT_STEPS,
        cu_seqlens=offsets,
        schedule=offsets,
        rows=rows,
        final_rows=final_rows,
    )  # fmt: skip
    return base, beta


def context(
    base: LaunchContext, x: DeltaInputs, spec: DeltaSpec, beta: Tensor, norms: Tensor | None = None
) -> DeltaContext:
    """Return the context of a call with at most one gate a step.

    `norms` are those that the forward has stored. Without them a call whose kernels normalize q and k, which is then a
    forward, gets memory for them, which its kernels fill.
    """
    config = delta_config(base.K, base.V, architecture(x.q.device), read_key=x.read_key is not None)
    if not spec.normalize_qk:
        norms = None
    elif norms is None:
        norms = base.new(2, base.B, base.T, base.H)
    return DeltaContext(base=base, x=x, spec=spec, config=config, beta=beta, norms=norms)


def takes_channel_kernels(x: DeltaInputs, spec: DeltaSpec) -> bool:
    """Return whether the kernels of :mod:`.channel_rule` compute a call."""
    return x.channel_gates or spec.read_before_decay or not spec.correct


# A backward of a call with at most one gate a step; its arguments are those of :func:`backward`.
Backward = Callable[[DeltaContext, Tensor, Tensor, Tensor, "Tensor | None"], DeltaGrads]

# What computes the cotangents of initial states; its arguments are those of :func:`initial_cotangent`.
InitialCotangent = Callable[[DeltaContext, Tensor, Tensor, Tensor], Tensor]

# What chooses the kernels for a call of :mod:`.channel_rule`.
ChooseByChannel = Callable[[channel_rule.ChannelContext], channel_rule.ChannelKernels]


# What solves for X, from the gate vectors.
Solve = Callable[[DeltaContext, Tensor], Tensor]

# What launches the scan for h; its arguments are those of `launch_h` of :mod:`.delta_kernels`.
LaunchH = Callable[[DeltaContext, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], None]


class ForwardKernels(NamedTuple):
    """The launchers that a backend chooses for a forward; their arguments are those of :data:`KERNELS`."""

    solve: Solve  # of X
    h: LaunchH
    by_channel: ChooseByChannel


def by_triton(ctx: channel_rule.ChannelContext) -> channel_rule.ChannelKernels:
    """Return the kernels of Triton."""
    return channel_rule.TRITON


KERNELS = ForwardKernels(delta_kernels.launch_solve, delta_kernels.launch_h, by_triton)


def forward(ctx: DeltaContext, kernels: ForwardKernels) -> DeltaOutputs:
    """Launch the forward."""
    x, spec, base = ctx.x, ctx.spec, ctx.base
    h = base.new(*x.v.shape, dtype=x.v.dtype)
    E = base.new(*x.v.shape, dtype=x.v.dtype) if spec.save else None
    ctx = replace(ctx, base=sequences.bound(base, h, *(() if E is None else (E,))))
    initial, final = results.ends_of_states(base)
    gates = ctx.gates()
    X = kernels.solve(ctx, gates)
    kernels.h(ctx, gates, X, h, E, initial, final)
    none = base.placeholder(0)
    chunk_C = none
    if spec.save:
        chunk_C = base.placeholder(0, base.H, base.K, base.V) if ctx.norms is None else ctx.norms
    return DeltaOutputs(
        h,
        none if final is None else final,
        none if E is None else E,
        X if spec.save else none,
        chunk_C,
    )


def backward(ctx: DeltaContext, E: Tensor, X: Tensor, dh: Tensor, dC: Tensor | None) -> DeltaGrads:
    """Launch the backward.

    Args:
        ctx: The context of the call.
        E, X: What the forward stored.
        dh: The cotangent of h, (B, T, H, dhv).
        dC: The cotangent of the final states, (N, H, dqk, dhv), or None.
    """
    x, base, scale = ctx.x, ctx.base, ctx.spec.scale
    dh = results.dense_rows(base, dh)
    shape = base.B, base.T, base.H, base.K
    dq, dr = (base.new(*shape, dtype=x.q.dtype) for _ in range(2))
    # Without gates what one reader contributes grows with time, although the sum of both does not.
    apart = not ctx.gated and ctx.config.dq_dk.blocks == 1
    dk = base.new(*shape, dtype=torch.float32 if apart else x.q.dtype)
    dv = base.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = base.new(x.sequences, base.H, base.K, base.V) if x.C is not None else None
    # The last scan adds what the others have left, dk and without a read key dr, and stores the sum: over dk, or over
    # dr where dk is in float32. It stores to another tensor where dr is a result itself, or where a launch must not
    # read and write a tensor by two of its parameters.
    total = dk if not apart else dr
    if base.recorder.one_pointer_each or (apart and x.read_key is not None):
        total = base.new(*shape, dtype=x.q.dtype)
    base = sequences.bound(base, dq, dr, dk, dv, *(() if total is dk or total is dr else (total,)))
    ctx = replace(ctx, base=base)
    gates = ctx.gates()
    C, dC = results.dense(base, x.C), results.dense(base, dC)
    dbeta, do_e = delta_kernels.launch_dv(ctx, gates, X, E, dh, dv, dC, dC0)
    programs = ceil_div(base.K, ctx.config.dq_dk.split)
    reads = base.new(2 * programs, base.H, base.tiles, 1, base.L)
    pair_sums = base.new(2 * programs, base.H, base.tiles, gate_gradients.PAIR_SUMS.value, base.L)
    states, by_queries, by_reads = new_checkpoints(ctx)
    by_starts = new_starts(ctx, base)

    def parts(n: int) -> tuple[Tensor, Tensor]:
        """Return the parts of `reads` and `pair_sums` for queries, n = 0, or for read keys, n = 1."""
        cut = n * programs, (n + 1) * programs
        return base.recorder.rows(reads, *cut), base.recorder.rows(pair_sums, *cut)

    delta_kernels.launch_dq_dk(
        ctx, gates, x.k, E, dh, x.q, dq, do_e, *parts(0), factor=scale, reverse=False, initial=C,
        checkpoints=states,
    )  # fmt: skip
    delta_kernels.launch_dq_dk(
        ctx, gates, x.k, E, dv, ctx.read_key, dr, None, *parts(1), factor=-1.0, reverse=False, initial=C,
        checkpoints=None,
    )  # fmt: skip
    delta_kernels.launch_dq_dk(
        ctx, gates, x.q, dh, E, x.k, dk, do_e, *parts(0), factor=scale, reverse=True, initial=None,
        checkpoints=by_queries, final=by_starts[0] if by_starts else None,
    )  # fmt: skip
    delta_kernels.launch_dq_dk(
        ctx, gates, ctx.read_key, dv, E, x.k, total, None, *parts(1), factor=-1.0, reverse=True, initial=dC,
        checkpoints=by_reads, final=by_starts[1] if by_starts else None,
        add=(dk,) if x.read_key is not None else (dk, dr),
    )  # fmt: skip
    df = None
    if x.log_f is not None:
        dots = checkpoint_dots(ctx, gates, states, by_queries, by_reads)
        df = gate_gradient(ctx, gates, reads, pair_sums, dots, start_dots(base, gates, C, dC0, by_starts), dC)
    dq, dk = (reductions.launch(base, t, base.group) for t in (dq, total))
    read_key = reductions.launch(base, dr, base.group) if x.read_key is not None else None
    none = base.placeholder(0)
    found = (dq, dk, dv, dbeta if x.beta is not None else None, df, read_key, None, None, dC0)
    return DeltaGrads(*(none if t is None else t for t in found))


def initial_cotangent(ctx: DeltaContext, E: Tensor, X: Tensor, dh: Tensor) -> Tensor:
    """Launch the scan of the backward that makes the cotangents of the initial states, (N, H, dqk, dhv), from dh alone.

    The arguments are those of :func:`backward`.
    """
    x, base = ctx.x, ctx.base
    dh, dv = results.dense_rows(base, dh), base.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = base.new(x.sequences, base.H, base.K, base.V)
    ctx = replace(ctx, base=sequences.bound(base))
    delta_kernels.launch_dv(ctx, ctx.gates(), X, E, dh, dv, None, dC0)
    return dC0


def new_checkpoints(ctx: DeltaContext) -> tuple[Tensor | None, ...]:
    """Allocate checkpoints of C, and of the cotangents from queries and from reads, or return None."""
    shape = checkpoint_shape(ctx.base)
    if not ctx.gated or not shape[0]:
        return None, None, None
    return tuple(ctx.base.new(*shape, dtype=ctx.x.q.dtype) for _ in range(3))


def new_starts(ctx: DeltaContext, base: LaunchContext, scans: int = 2) -> tuple[Tensor, ...]:
    """Allocate what queries and reads each add to the cotangents of initial states, (N, H, K, V), or return nothing.

    The gradient of gates takes these, not what the scan for dv has: they come from the same operands as its other
    terms, so more of their rounding cancels. Where dhv is above 128 no register is left for them.

    Args:
        ctx: The context of the call.
        base: The context of the scans for dk, which write them.
        scans: The number of these scans; one that is for both readers writes their sum.
    """
    if not ctx.gated or ctx.x.C is None or base.V > 128:
        return ()
    return tuple(base.new(ctx.x.sequences, base.H, base.K, base.V) for _ in range(scans))


def start_dots(
    base: LaunchContext, gates: Tensor, C: Tensor | None, dC0: Tensor | None, by_starts: tuple[Tensor, ...]
) -> Tensor | None:
    """Compute the parts of <C, dC> at the starts of sequences, (N * H, parts), or return None without initial states.

    C is rounded as it is where the steps of the first tile read it, so that rounding cancels in what later tiles read.

    Args:
        base: The context of the scans for dk.
        gates: The gate vectors, which stand for what is not there.
        C: The initial states, (N, H, K, V), or None.
        dC0: Their cotangents from the scan for dv, (N, H, dqk, dhv), or None.
        by_starts: The result of `new_starts`.
    """
    if C is None or dC0 is None:
        return None
    parts = [
        gate_gradients.launch_checkpoint_dots(base, (C, base.x.q), (t, gates), round_states=True)
        for t in by_starts or results.pad_state(base, dC0, None)
        if t is not None
    ]
    return base.recorder.scaled_columns(parts[0], 1.0, parts[1], 1.0) if len(parts) > 1 else parts[0]


def checkpoint_dots(
    ctx: DeltaContext, gates: Tensor, states: Tensor | None, by_queries: Tensor | None, by_reads: Tensor | None
) -> Tensor:
    """Compute the parts of <C, dC> at the checkpoints, (checkpoints * H, parts).

    Args:
        ctx: The context of the call.
        gates: The gate vectors, which stand for what is not there.
        states: C at the checkpoints, (checkpoints, H, dqk, dhv), or None where there are none.
        by_queries: dC / scale from queries there, or None.
        by_reads: -dC from reads there, or None.
    """
    base = ctx.base
    if states is None or by_queries is None or by_reads is None:
        return base.new(0, 1, dtype=torch.float64)
    queries, read = (
        gate_gradients.launch_checkpoint_dots(base, (states, gates), (t, gates)) for t in (by_queries, by_reads)
    )
    return base.recorder.scaled_columns(queries, ctx.spec.scale, read, -1.0)


def gate_gradient(
    ctx: DeltaContext, gates: Tensor, reads: Tensor, pair_sums: Tensor, dots: Tensor, starts: Tensor | None,
    dC: Tensor | None, read_error: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute the gradient of log_f, (B, T, H), see :mod:`tfla.backends.gpu.gate_gradients`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        reads: What steps read of earlier tiles, (parts, H, tiles, 1, L).
        pair_sums: Sums of pairs of steps, (parts, H, tiles, PAIR_SUMS, L).
        dots: Parts of <C, dC> at the checkpoints, (checkpoints * H, parts).
        starts: Parts of <C, dC> at the starts of sequences, (N * H, parts), or None without initial states.
        dC: The cotangents of the final states, or None.
        read_error: READ_ERROR of :mod:`tfla.backends.gpu.rounded_sums`.
    """
    base = ctx.base
    assert ctx.x.log_f is not None
    df = base.new(*ctx.x.log_f.shape, dtype=ctx.x.log_f.dtype)
    sequences.clear(base, df)
    grads = results.Gradients(dq=df, dk=df, dv=df, di=None, df=df, dC0=None, dn0=None)
    gate_gradients.launch(
        base, gates, reads, pair_sums, dots, (starts, None), (dC, None), grads, final_cotangent=dC is not None,
        by_pairs=True, start_dots=0 if starts is None else starts.shape[1], read_error=read_error,
    )  # fmt: skip
    return df


def launch_forward(
    recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels = KERNELS,
    rows: Tensor | None = None, final_rows: FinalRows | None = None,
) -> DeltaOutputs:  # fmt: skip
    """Launch the forward by the kernels that take the call."""
    base, beta = launch_context(recorder, x, spec, rows, final_rows)
    if takes_channel_kernels(x, spec):
        ctx = channel_rule.context(base, x, spec, beta)
        return channel_rule.forward(ctx, kernels.by_channel(ctx))
    return forward(context(base, x, spec, beta), kernels)


def launch_backward(
    recorder: LaunchRecorder, x: DeltaInputs, spec: DeltaSpec, E: Tensor, X: Tensor, dh: Tensor, dC: Tensor | None,
    by: Backward = backward, by_channel: ChooseByChannel = by_triton, norms: Tensor | None = None,
) -> DeltaGrads:  # fmt: skip
    """Launch the backward by the kernels that take the call, with at most one gate a step by `by`.

    For a call of :mod:`.channel_rule`, `by_channel` chooses them. `norms` are those that the forward has stored.
    """
    base, beta = launch_context(recorder, x, spec)
    if takes_channel_kernels(x, spec):
        ctx = channel_rule.context(base, x, spec, beta)
        return channel_rule.backward(ctx, E, X, dh, dC, by_channel(ctx))
    return by(context(base, x, spec, beta, norms), E, X, dh, dC)


def call_signature(direction: Hashable, x: DeltaInputs, spec: DeltaSpec, *more: Tensor | None) -> Hashable:
    """Return all that the launches of a call depend on; `more` are further tensors that are given."""
    return direction, "delta", spec, torch.get_float32_matmul_precision(), static((*x, *more))


def run_forward(
    x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels = KERNELS, rows: Tensor | None = None,
    final_rows: FinalRows | None = None,
) -> DeltaOutputs:  # fmt: skip
    """Record or replay the launches of the forward; with `rows`, x.C is the pool that has these rows.

    `final_rows` are the pool that gets the final C and its rows, or None where these are the same.
    """
    given: Sequence[Tensor | None] = x if rows is None else (*x, rows, *(final_rows or ()))
    signature = call_signature(("forward", kernels), x, spec, *given[len(x) :])
    recorded = recorded_launches(signature)
    if recorded is not None:
        return DeltaOutputs(*recorded(given))
    with recording(signature, given) as recorder:
        inputs = DeltaInputs(*recorder.given[: len(x)])  # type: ignore[arg-type]
        own, *final = recorder.given[len(x) :] or (None,)
        other: Any = FinalRows(*final) if final else None  # type: ignore[arg-type]
        out = recorder.results = launch_forward(recorder, inputs, spec, kernels, own, other)
    return out


def forward_replay(x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels = KERNELS) -> Replay | None:
    """Return the recorded launches of an earlier `run_forward` with this signature, or None; always for float32."""
    return None if x.q.dtype == torch.float32 else recorded_launches(call_signature(("forward", kernels), x, spec))


def run_backward(
    x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec, by: Backward = backward,
    by_channel: ChooseByChannel = by_triton,
) -> DeltaGrads:  # fmt: skip
    """Record or replay the launches of the backward."""
    given = *x, out.E, out.X, dh, dC, out.chunk_C if spec.normalize_qk else None
    signature = call_signature(("backward", by, by_channel), x, spec, *given[len(x) :])
    found: Sequence[Tensor | None]
    recorded = recorded_launches(signature)
    if recorded is not None:
        found = recorded(given)
    else:
        with recording(signature, given) as recorder:
            inputs = DeltaInputs(*recorder.given[: len(x)])  # type: ignore[arg-type]
            read: Any = recorder.given[len(x) :]
            E, X, dh, dC, norms = read
            grads = launch_backward(recorder, inputs, spec, E, X, dh, dC, by, by_channel, norms)
            found = recorder.results = grads  # type: ignore[assignment]
    return DeltaGrads(*(None if t is None else g for g, t in zip(found, x, strict=False)))  # type: ignore[arg-type]


def run_initial_cotangent(
    x: DeltaInputs, out: DeltaOutputs, dh: Tensor, spec: DeltaSpec, by: InitialCotangent = initial_cotangent
) -> Tensor:
    """Record or replay the launches of :func:`initial_cotangent`, for calls without the kernels of `channel_rule`."""
    assert not spec.normalize_qk, "norms that a forward has stored are not taken here"
    given = *x, out.E, out.X, dh
    signature = call_signature(("initial cotangent", by), x, spec, *given[len(x) :])
    recorded = recorded_launches(signature)
    if recorded is not None:
        (dC0,) = recorded(given)
        assert dC0 is not None
        return dC0
    with recording(signature, given) as recorder:
        inputs = DeltaInputs(*recorder.given[: len(x)])  # type: ignore[arg-type]
        base, beta = launch_context(recorder, inputs, spec)
        read: Any = recorder.given[len(x) :]
        E, X, cotangent = read
        found = by(context(base, inputs, spec, beta), E, X, cotangent)
        recorder.results = (found,)
    return found
