"""The launches of the Hopper kernels for heads of at least 128 x 128: one forward, one backward.

The equations are those of docs/mathematics.md. Gradients and results are named as in :mod:`tfla.backends.base`.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import Grads, Outputs
from tfla.backends.gpu import exchanging, gate_gradients, gate_kernels, reductions, results, sequences
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.family import KernelFamily
from tfla.backends.hopper import config, dk_dv, dq_dk_launch, gate_warp, o_dv, scheduler, segment_starts, segment_states
from tfla.backends.hopper.gate_warp import GateVectors
from tfla.backends.hopper.host import STATE_ROWS, num_partials
from tfla.backends.triton import denominators


def forward(ctx: LaunchContext) -> Outputs:
    """Launch the forward."""
    h = results.new_h(ctx)
    ctx = exchanging.with_max_states(scheduler.launch(sequences.bound(ctx, h)))
    out = results.new_outputs(ctx, h)
    gates = gate_warp.launch(ctx, m_final=out.m)  # (G1) to (G5)
    scan = _scan_segments(ctx, gates, skip_last=out.C is None and ctx.exchange is None) if ctx.segmented else None
    starts, ends, stored = segment_starts.of_forward(ctx, out, scan)
    # o and d with C and n, (T1) to (T6).
    if ctx.K <= STATE_ROWS:
        o_dv.launch(ctx, gates, ctx.x.k, ctx.x.v, ctx.x.q, out.h, reverse=False, initial=starts, final=ends, d=out.d)
    else:
        if ctx.spec.normalize and not dq_dk_launch.fuses_normalizer(ctx):
            denominators.launch(ctx, gates.vectors, initial=starts[1], final=ends[1], d=out.d)
        dq_dk_launch.launch_o(ctx, gates, out.h, out.d, initial=starts, final=ends)
    return results.forward_results(ctx, out, stored)


def _scan_segments(
    ctx: LaunchContext, gates: gate_warp.GateVectors, *, skip_last: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute what each segment adds to C and n, and the decays over segments."""
    return segment_states.launch(
        ctx, gates, ctx.x.k, ctx.x.v, reverse=False, normalize=ctx.spec.normalize, skip_last=skip_last
    )


def backward(ctx: LaunchContext, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None) -> Grads:
    """Launch the backward.

    Args:
        ctx: The context of the call.
        out: The results of the forward.
        dh: The cotangent of h, (B, T, H, dhv).
        dC, dn: The cotangents of the final states, (N, H, dqk, dhv) and (N, H, dqk), or None.
    """
    x, normalize = ctx.x, ctx.spec.normalize
    delta = normalize and ctx.spec.normalizer_grad
    delta_with_dv = delta and o_dv.computes_delta(ctx)
    # With an exchange dv waits for the cotangents of other processes. dq comes first, unless it reads delta from dv.
    dv_first = delta_with_dv or ctx.exchange is None
    dh = results.dense_rows(ctx, dh)
    shares = ctx.group * num_partials(ctx.V)
    grads = results.new_gradients(ctx, shares=shares)
    ctx = scheduler.launch(sequences.bound(ctx, *grads.of_steps()))
    gates = gate_warp.launch(ctx, d=out.d if normalize else None)
    if delta and not delta_with_dv:  # (T7)
        gate_kernels.launch_delta(ctx, gates.vectors, out.h, dh)
    scan = _scan_segments(ctx, gates, skip_last=True) if segment_starts.needs_scan(ctx) else None
    starts = segment_starts.of_backward(ctx, out, scan)
    dC, dn = dC_ends, dn_ends = results.final_cotangents(ctx, dC, dn)
    dC_starts, dn_starts, pending = grads.dC0, grads.dn0, None
    if ctx.segmented:
        # dC at segment ends: what segments add, then state passing.
        dC_ends, _, decays = segment_states.launch(
            ctx, gates, x.q, dh, reverse=True, normalize=False, skip_last=grads.dC0 is None and ctx.exchange is None
        )  # fmt: skip
        pending = exchanging.pass_cotangents(ctx, dC_ends, decays, dC, first=grads.dC0)
        dC_starts = dn_starts = None
    if dv_first:
        dC = exchanging.finish_cotangents(ctx, pending, dC)
        _launch_dv(ctx, gates, dh, grads.dv, dC_ends, h=out.h if delta_with_dv else None)
    # dq, (T8), (T9), with q . dq, checkpoints of C and n, and what segments add to dn.
    q_dq, checkpoints, dn_segments = dq_dk_launch.launch_dq(ctx, gates, dh, grads.dq, starts=starts, delta=delta)
    if ctx.segmented and normalize:  # dn at segment ends
        dn_ends = ctx.zeros(ctx.segments, ctx.H, ctx.K) if dn_segments is None else dn_segments
    if not dv_first:
        dC = exchanging.finish_cotangents(ctx, pending, dC)
        _launch_dv(ctx, gates, dh, grads.dv, dC_ends, h=None)
    if ctx.segmented and dn_ends is not None:
        pending = exchanging.pass_cotangents(ctx, dn_ends, decays, dn, first=grads.dn0, of_n=True)
        exchanging.finish_cotangents(ctx, pending, dn)
    # dk, (T8), (T10), with k . dk and <C, dC> at the checkpoints.
    if dk_dv.supports(ctx):
        k_dk, dots = dk_dv.launch(
            ctx, gates, dh, grads.dk, grads.dv, checkpoints[0], ends=dC_ends, final=dC_starts
        )  # fmt: skip
    else:
        k_dk, dots = dq_dk_launch.launch_dk(
            ctx, gates, dh, grads.dk, checkpoints, ends=(dC_ends, dn_ends), final=(dC_starts, dn_starts), delta=delta
        )  # fmt: skip
    # di and df, (D1) to (D3); then sums over the heads that share q and k, and over programs.
    gate_gradients.launch(
        ctx, gates.vectors, q_dq, k_dk, dots, starts, (dC_ends, dn_ends), grads, final_cotangent=dC is not None
    )
    dq, dk = (reductions.launch(ctx, t, shares) for t in (grads.dq, grads.dk))
    return results.backward_results(ctx, dq, dk, grads)


def _launch_dv(
    ctx: LaunchContext, gates: GateVectors, dh: Tensor, dv: Tensor, ends: Tensor | None, h: Tensor | None
) -> None:
    """Compute dv, (T11), (T12), unless a kernel computes it with dk.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        dh: The cotangent of h, (B, T, H, dhv).
        dv: Output, (B, T, H, dhv).
        ends: The cotangents of C that scans start from, (segments, H, K, V), or None for zeros.
        h: The output, (B, T, H, dhv), where the kernel computes delta, (T7), else None.
    """
    if ctx.K > STATE_ROWS:
        dq_dk_launch.launch_dv(ctx, gates, dh, dv, ends=ends)
    elif not dk_dv.supports(ctx):
        o_dv.launch(
            ctx, gates, ctx.x.q, dh, ctx.x.k, dv, reverse=True, initial=(ends, None), final=results.NO_STATE, h=h
        )


FAMILY = KernelFamily(
    name="hopper", signature=config.signature, context=config.context, forward=forward, backward=backward
)
