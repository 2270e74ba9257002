"""The launches of `dq_dk_kernel`: dq and dk, and with the state transposed o and dv of dqk above 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.backends.gpu import reductions, sequences
from tfla.backends.gpu.checkpoints import new_checkpoints
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.results import NO_STATE, new_segment_n
from tfla.backends.hopper import dq_dk, host
from tfla.backends.hopper.gate_warp import GateVectors
from tfla.backends.hopper.split_reduce import PAIR

RING_STAGES = 2  # the widest tiles then take 192 KiB of shared memory


def launch_dq(
    ctx: LaunchContext, gates: GateVectors, dh: Tensor, dq: Tensor, *, starts: Pair, delta: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:  # fmt: skip
    """Compute dq into `dq`, and store checkpoints of the states.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dq: Output, (B, T, H * partials, dqk).
        starts: C and n where work tiles start, (segments, H, K, V) and (segments, H, K), or None for zeros.
        delta: Whether the normalizer adds delta to P.

    Returns:
        The sums q . dq, (programs of a head, H, tiles, 1, L), the checkpoints of C and n, and with segments and delta
        what segments add to dn, (segments, H, K), else None.
    """
    x, sums = ctx.x, ctx.new(host.programs_per_state(ctx), ctx.H, ctx.tiles, 1, ctx.L)
    checkpoints = new_checkpoints(ctx, sums)
    dn = new_segment_n(ctx) if ctx.segmented and delta else None
    launch(
        ctx, gates, x.k, x.v, dh, x.q, dq, sums, (*checkpoints, gates.vectors), reverse=False, initial=starts,
        final=(None, dn), delta=delta,
    )  # fmt: skip
    return sums, checkpoints, dn


def launch_dk(
    ctx: LaunchContext, gates: GateVectors, dh: Tensor, dk: Tensor, checkpoints: tuple[Tensor, Tensor], *, ends: Pair,
    final: Pair, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute dk into `dk`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dk: Output, (B, T, H * partials, dqk).
        checkpoints: The checkpoints of C and n.
        ends: dC and dn where work tiles end, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for dC and dn where work tiles start, or None.
        delta: Whether the normalizer adds delta to P.

    Returns:
        The sums k . dk, (programs of a head, H, tiles, 1, L), and the parts of <C, dC> at the checkpoints,
        (checkpoints * H, parts).
    """
    x, programs = ctx.x, host.programs_per_state(ctx)
    sums = ctx.new(programs, ctx.H, ctx.tiles, 1, ctx.L)
    dots = ctx.new(checkpoints[0].shape[0] * ctx.H, host.CONSUMER_WARPS * programs)
    launch(
        ctx, gates, x.q, dh, x.v, x.k, dk, sums, (*checkpoints, dots), reverse=True, initial=ends, final=final,
        delta=delta,
    )  # fmt: skip
    return sums, dots


def launch_o(
    ctx: LaunchContext, gates: GateVectors, h: Tensor, d: Tensor | None, *, initial: Pair, final: Pair
) -> None:  # fmt: skip
    """Compute o by the transposed state into `h`, (B, T, H, dhv).

    Args:
        ctx: The context of the call.
        gates: The gate vectors, which contain the denominators unless `fuses_normalizer`.
        h: Output.
        d: Output for the denominators, (B, T, H), or None; written where `fuses_normalizer`.
        initial: Initial states of work tiles, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for the states after work tiles, or None.
    """
    x = ctx.x
    _launch_transposed(ctx, gates, x.v, x.k, x.q, h, False, initial, final, fuses_normalizer(ctx), d)


def launch_dv(ctx: LaunchContext, gates: GateVectors, dh: Tensor, dv: Tensor, *, ends: Tensor | None) -> None:
    """Compute dv by the transposed state into `dv`, (B, T, H, dhv).

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dv: Output.
        ends: dC where work tiles end, (segments, H, K, V), or None for zeros.
    """
    x = ctx.x
    _launch_transposed(ctx, gates, dh, x.q, x.k, dv, True, (ends, None), NO_STATE, False, None)


def fuses_normalizer(ctx: LaunchContext) -> bool:
    """Return whether `launch_o` divides by the denominators: each program has all of n."""
    return ctx.spec.normalize and host.num_splits(ctx.K) == 1


def _launch_transposed(
    ctx: LaunchContext, gates: GateVectors, x: Tensor, y: Tensor, z: Tensor, out: Tensor, reverse: bool, initial: Pair,
    final: Pair, fuse_normalizer: bool, d: Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel for C^T, and sum the partial outputs where programs leave several."""
    partials, vectors = host.num_partials(ctx.K), gates.vectors
    shape = ctx.B, ctx.T, ctx.H * partials, out.shape[3]
    to = out if partials == 1 else ctx.new(*shape, dtype=out.dtype)
    sums = d if fuse_normalizer and d is not None else vectors
    launch(
        ctx, gates, x, y, z, out, to, sums, (vectors, vectors, vectors), reverse=reverse, initial=initial, final=final,
        transposed=True, fuse_normalizer=fuse_normalizer,
    )  # fmt: skip
    if partials > 1:
        sequences.clear(ctx, to)
        reductions.launch(ctx, to, partials, out)


def launch(
    ctx: LaunchContext, gates: GateVectors, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, sums: Tensor,
    checkpoints: tuple[Tensor, Tensor, Tensor], *, reverse: bool, initial: Pair, final: Pair, delta: bool = False,
    transposed: bool = False, fuse_normalizer: bool = False, reader: Any = dq_dk.NO_READER, save_sums: bool = False,
    norms: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Launch `dq_dk_kernel`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z, w: The operands, in the table of :mod:`.dq_dk`.
        out: Output like x.
        sums: Output for w . out; with `transposed` for d, or the gate vectors for neither.
        checkpoints: C and n at checkpoints, and the output for the parts of <C, dC>.
        reverse: Whether the scan goes against time.
        initial: Initial states of work tiles, C and n, or None for zeros.
        final: Outputs for the states after work tiles, or None.
        delta: Whether to add delta.
        transposed: Whether to compute o or dv.
        fuse_normalizer: Whether the kernel divides by the denominators.
        reader: Which reader of the delta rule has the cotangent; beta is then the input gate of the context.
        save_sums: Whether a reader's launch stores sums of pairs: those of one tile to the second of `final`.
        norms: With a reader 1 / |k|, that of the reader and dbeta, (B, T, H) each, where q and k are divided by their
            norms, or None.
    """
    vectors = gates.vectors
    C, n, C_final, n_final = (vectors if t is None else t for t in (*initial, *final))
    DX, DY = (ctx.V, ctx.K) if transposed else (ctx.K, ctx.V)
    state_dims = ctx.state_dims[::-1] if transposed else ctx.state_dims
    splits = host.num_splits(DY)
    grid = host.grid(ctx, DX // host.STATE_ROWS * splits)
    zero_counts = vectors if splits == 1 else ctx.zeros(grid[0] * grid[1] // PAIR.value, dtype=torch.int32)
    ctx.launch(dq_dk.dq_dk_kernel, grid,
        host.descriptor(ctx, x, host.STATE_ROWS), host.descriptor(ctx, y, DY // splits),
        host.descriptor(ctx, z, DY // splits), host.descriptor(ctx, out, 64), vectors, *ctx.gate_inputs,
        *(norms or (vectors, vectors, vectors)), sums, C,
        C_final, n, n_final, *checkpoints, zero_counts, ctx.schedule, host.descriptor(ctx, w, 64),
        *host.kernel_scalars(ctx), DX=DX, DY=DY, NUM_SPLITS=splits, L=ctx.L, STAGES=RING_STAGES,
        CHECKPOINT_STEPS=ctx.checkpoint_steps, REVERSE=reverse, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=initial[0] is not None, STORE_FINAL_STATE=final[0] is not None,
        NORMALIZE=ctx.spec.normalize and not transposed, USE_DP_OFFSET=delta, TRANSPOSED=transposed,
        FUSE_NORMALIZER=fuse_normalizer, SAVE_D=fuse_normalizer and sums is not vectors, READER=reader.value,
        NORMS=norms is not None, SAVE_SUMS=save_sums, IS_VARLEN=ctx.packed, **gates.constants, INDEXED=ctx.indexed,
        STATE_DX=state_dims[0], STATE_DY=state_dims[1], num_warps=4,
    )  # fmt: skip
