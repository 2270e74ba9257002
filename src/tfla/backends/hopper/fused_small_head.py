"""The launches of the Hopper kernel for small heads, which computes every scan: one forward, one backward.

The equations are those of docs/mathematics.md. Gradients and results are named as in :mod:`tfla.backends.base`.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import Grads, Outputs
from tfla.backends.gpu import exchanging, gate_gradients, reductions, results, sequences
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.family import KernelFamily
from tfla.backends.hopper import config, gate_warp, scheduler, segment_starts, small_head_launch
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
    small_head_launch.launch_o(ctx, gates, out.h, out.d, initial=starts, final=ends)
    return results.forward_results(ctx, out, stored)


def _scan_segments(
    ctx: LaunchContext, gates: gate_warp.GateVectors, *, skip_last: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute what each segment adds to C and n, and the decays over segments."""
    return small_head_launch.launch_segment_states(
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
    dh = results.dense_rows(ctx, dh)
    shares = ctx.group // 2 if small_head_launch.pairs_heads(ctx) else ctx.group
    grads = results.new_gradients(ctx, shares=shares)
    ctx = scheduler.launch(sequences.bound(ctx, *grads.of_steps()))
    gates = gate_warp.launch(ctx, d=out.d if normalize else None)
    scan = _scan_segments(ctx, gates, skip_last=True) if segment_starts.needs_scan(ctx) else None
    starts = segment_starts.of_backward(ctx, out, scan)
    dC, dn = dC_ends, dn_ends = results.final_cotangents(ctx, dC, dn)
    dC_starts, dn_starts, pending = grads.dC0, grads.dn0, None
    if ctx.segmented:
        # dC at segment ends: what segments add, then state passing.
        dC_ends, _, decays = small_head_launch.launch_segment_states(
            ctx, gates, x.q, dh, reverse=True, normalize=False, skip_last=grads.dC0 is None and ctx.exchange is None
        )  # fmt: skip
        pending = exchanging.pass_cotangents(ctx, dC_ends, decays, dC, first=grads.dC0)  # goes on beside dq
        dC_starts = dn_starts = None
    # dq, (T7) to (T9), with q . dq and checkpoints of C and n.
    q_dq, checkpoints = small_head_launch.launch_dq(ctx, gates, dh, grads.dq, starts=starts, delta=delta)
    if ctx.segmented and normalize:  # dn at segment ends
        skip_last = grads.dn0 is None and ctx.exchange is None
        dn_ends = denominators.launch_segment_dn(ctx, gates.vectors, delta=delta, skip_last=skip_last)
    dC = exchanging.finish_cotangents(ctx, pending, dC)
    if ctx.segmented and dn_ends is not None:
        pending = exchanging.pass_cotangents(ctx, dn_ends, decays, dn, first=grads.dn0, of_n=True)
        exchanging.finish_cotangents(ctx, pending, dn)
    # dk and dv, (T8), (T10) to (T12), with k . dk and <C, dC> at the checkpoints.
    k_dk, dots = small_head_launch.launch_dk_dv(
        ctx, gates, dh, grads.dk, grads.dv, checkpoints, ends=(dC_ends, dn_ends), final=(dC_starts, dn_starts),
        delta=delta,
    )  # fmt: skip
    # di and df, (D1) to (D3); then sums over the heads that share q and k.
    gate_gradients.launch(
        ctx, gates.vectors, q_dq, k_dk, dots, starts, (dC_ends, dn_ends), grads, final_cotangent=dC is not None
    )
    dq, dk = (reductions.launch(ctx, t, shares) for t in (grads.dq, grads.dk))
    return results.backward_results(ctx, dq, dk, grads)


FAMILY = KernelFamily(
    name="hopper small heads", signature=config.signature, context=config.context, forward=forward, backward=backward
)
