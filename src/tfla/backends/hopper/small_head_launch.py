"""The launches of `small_head_kernel`, which computes every scan of small heads."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.gpu.checkpoints import new_checkpoints
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.results import NO_STATE, new_segment_n, new_segment_states
from tfla.backends.hopper import host, small_head
from tfla.backends.hopper.gate_warp import GateVectors

SHARED_MEMORY_BYTES = 232_448  # bytes of shared memory that a program can have
GATE_VECTOR_BYTES = 1_536  # bytes of the gate vectors of a head in a stage


def max_stages(
    K: int, V: int, *, qk_tiles: int, v_tiles: int, heads: int, shared_qk: bool, states: int
) -> int:  # fmt: skip
    """Return how many stages of the ring fit in shared memory, at most 4.

    Args:
        K: The dqk of the kernel.
        V: The dhv of the kernel.
        qk_tiles: Tiles of q or k that a head has in a stage.
        v_tiles: Tiles of v or do that a head has in a stage.
        heads: Heads of a program.
        shared_qk: Whether these share q and k.
        states: States of each head in shared memory.
    """
    L = 64
    stage = 2 * L * (qk_tiles * K * (1 if shared_qk else heads) + v_tiles * V * heads) + heads * GATE_VECTOR_BYTES
    kept = 2 * heads * K * V * states + 2 * L * K * shared_qk + 4 * heads * K + 256
    return min(4, (SHARED_MEMORY_BYTES - kept) // stage)


def pairs_heads(ctx: LaunchContext) -> bool:
    """Return whether a program computes two heads that share q and k; then dq and dk of both are one sum."""
    # The scan for dk and dv needs most.
    fits = max_stages(ctx.K, ctx.V, qk_tiles=2, v_tiles=2, heads=2, shared_qk=True, states=2) >= 2
    return ctx.group % 2 == 0 and fits


def launch_o(
    ctx: LaunchContext, gates: GateVectors, h: Tensor, d: Tensor | None, *, initial: Pair, final: Pair
) -> None:  # fmt: skip
    """Compute o into `h`, (B, T, H, dhv).

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        h: Output.
        d: Output for the denominators, (B, T, H), or None.
        initial: Initial states of work tiles, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for the states after work tiles, or None.
    """
    x = ctx.x
    _launch(ctx, gates, x.k, x.v, x.q, None, reverse=False, initial=initial, final=final, out_v=h, d=d)


def launch_segment_states(
    ctx: LaunchContext, gates: GateVectors, x: Tensor, y: Tensor, *, reverse: bool, normalize: bool, skip_last: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what each segment adds to C, or with `reverse` to dC, and the decays over segments.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y: k and v, or with `reverse` q and do.
        reverse: Whether the scan goes against time.
        normalize: Whether what segments add to n is computed as well.
        skip_last: Whether the last segments of sequences have no work: the states after them are not read.

    Returns:
        The states, (segments, H, K, V), n, (segments, H, K), or None, and the decays, (segments, H) float32.
    """
    C = new_segment_states(ctx)
    n = new_segment_n(ctx) if normalize else None
    decays = ctx.new(ctx.segments, ctx.H)
    _launch(
        ctx, gates, x, y, None, None, reverse=reverse, initial=NO_STATE, final=(C, n), decays=decays,
        skip_last=skip_last, normalize=normalize,
    )  # fmt: skip
    return C, n, decays


def launch_dq(
    ctx: LaunchContext, gates: GateVectors, dh: Tensor, dq: Tensor, *, starts: Pair, delta: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute dq, store checkpoints of the states, and with `delta` compute delta into the gate vectors.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dq: Output, (B, T, H, dqk), or with `pairs_heads` (B, T, H / 2, dqk).
        starts: C and n where work tiles start, (segments, H, K, V) and (segments, H, K), or None for zeros.
        delta: Whether the normalizer adds delta to P.

    Returns:
        The sums q . dq, (1, H, tiles, 1, L), and the checkpoints of C and n.
    """
    x, sums = ctx.x, ctx.new(1, ctx.H, ctx.tiles, 1, ctx.L)
    checkpoints = new_checkpoints(ctx, sums)
    _launch(
        ctx, gates, x.k, x.v, x.q, dh, reverse=False, initial=starts, final=NO_STATE, out_k=dq, sums=sums,
        checkpoints=checkpoints, delta=delta,
    )  # fmt: skip
    return sums, checkpoints


def launch_dk_dv(
    ctx: LaunchContext, gates: GateVectors, dh: Tensor, dk: Tensor, dv: Tensor, checkpoints: tuple[Tensor, Tensor], *,
    ends: Pair, final: Pair, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute dk and dv.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dk: Output, (B, T, H, dqk), or with `pairs_heads` (B, T, H / 2, dqk).
        dv: Output, (B, T, H, dhv).
        checkpoints: The checkpoints of C and n.
        ends: dC and dn where work tiles end, (segments, H, K, V) and (segments, H, K), or None for zeros.
        final: Outputs for dC and dn where work tiles start, or None.
        delta: Whether the normalizer adds delta to P.

    Returns:
        The sums k . dk, (1, H, tiles, 1, L), and <C, dC> at the checkpoints, (checkpoints * H, 1) float64.
    """
    x, sums = ctx.x, ctx.new(1, ctx.H, ctx.tiles, 1, ctx.L)
    dots = ctx.new(checkpoints[0].shape[0] * ctx.H, 1, dtype=torch.float64)
    _launch(
        ctx, gates, x.q, dh, x.k, x.v, reverse=True, initial=ends, final=final, out_v=dv, out_k=dk, sums=sums,
        checkpoints=checkpoints, dots=dots, delta=delta,
    )  # fmt: skip
    return sums, dots


def _launch(
    ctx: LaunchContext, gates: GateVectors, x: Tensor, y: Tensor, zk: Tensor | None, zv: Tensor | None, *,
    reverse: bool, initial: Pair, final: Pair, out_v: Tensor | None = None, out_k: Tensor | None = None,
    sums: Tensor | None = None, checkpoints: Pair = NO_STATE, dots: Tensor | None = None, d: Tensor | None = None,
    decays: Tensor | None = None, delta: bool = False, skip_last: bool = False, normalize: bool | None = None,
) -> None:  # fmt: skip
    """Launch `small_head_kernel`, which fills `out_v` and `out_k`, or without them only `final` and `decays`.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, zk, zv: The operands, in the table of :mod:`.small_head`.
        reverse: Whether the scan goes against time.
        initial: Initial states of work tiles, C and n, or None for zeros.
        final: Outputs for the states after work tiles, or None.
        out_v: Output o or dv, or None.
        out_k: Output dq or dk, or None.
        sums: Output for q . dq or k . dk.
        checkpoints: C and n at checkpoints.
        dots: Output for <C, dC>.
        d: Output for the denominators, or None.
        decays: Output for the decays over segments.
        delta: Whether to add delta.
        skip_last: Whether the last segments of sequences have no work.
        normalize: Whether the state has n; by default as the operator.
    """
    K, V, vectors = ctx.K, ctx.V, gates.vectors
    qk_tiles, v_tiles = (1 if zk is None else 2), (1 if zv is None else 2)
    if checkpoints[0] is None or checkpoints[0].shape[0] == 0:  # no segment is that long
        checkpoints, dots = NO_STATE, None
    C_checkpoints, n_checkpoints = checkpoints
    of_states = None if C_checkpoints is None else host.state_descriptor(ctx, C_checkpoints)
    states = 2 if C_checkpoints is not None and reverse else 1
    shared_qk = pairs_heads(ctx)
    two_fit = max_stages(K, V, qk_tiles=qk_tiles, v_tiles=v_tiles, heads=2, shared_qk=shared_qk, states=states) >= 2
    heads = 2 if ctx.H % 2 == 0 and two_fit else 1
    shared_qk = shared_qk and heads == 2
    X, Y = host.descriptor(ctx, x, K), host.descriptor(ctx, y, V)
    rest = (sums, d, dots, initial[0], final[0], initial[1], final[1], n_checkpoints, decays)
    work_tiles = ctx.segments * ctx.H // heads
    ctx.launch(small_head.small_head_kernel, (1, host.num_programs(ctx, work_tiles, 1)),
        X, Y, X if zk is None else host.descriptor(ctx, zk, K), Y if zv is None else host.descriptor(ctx, zv, V),
        Y if out_v is None else host.descriptor(ctx, out_v, V), X if out_k is None else host.descriptor(ctx, out_k, K),
        X if of_states is None else of_states, vectors, *ctx.gate_inputs, *(vectors if t is None else t for t in rest),
        ctx.schedule, ctx.T, ctx.tiles, ctx.H // heads, ctx.group, ctx.segment_steps, work_tiles, *ctx.gate_strides,
        *ctx.scales, HEADS=heads, SHARED_QK=shared_qk, DK=K, DV=V, L=ctx.L,
        STAGES=max_stages(
            K, V, qk_tiles=qk_tiles, v_tiles=v_tiles, heads=heads, shared_qk=shared_qk, states=states
        ),
        CHECKPOINT_STEPS=ctx.checkpoint_steps, REVERSE=reverse, IS_SEGMENTED=ctx.segmented,
        USE_INITIAL_STATE=initial[0] is not None, STORE_FINAL_STATE=final[0] is not None, SKIP_LAST=skip_last,
        OUTPUT_V=out_v is not None, OUTPUT_K=out_k is not None,
        NORMALIZE=ctx.spec.normalize if normalize is None else normalize, SAVE_D=d is not None, USE_DP_OFFSET=delta,
        HAS_CHECKPOINTS=C_checkpoints is not None, IS_VARLEN=ctx.packed, **gates.constants,
        INDEXED=ctx.indexed, STATE_DK=ctx.state_dims[0], STATE_DV=ctx.state_dims[1], num_warps=4,
    )  # fmt: skip
