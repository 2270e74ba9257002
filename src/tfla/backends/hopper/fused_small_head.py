"""The launches of the Hopper kernel for small heads, which computes every scan: one forward, one backward.

The equations are those of docs/mathematics.md. Gradients and results are named as in :mod:`tfla.backends.base`.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import Exchange, Grads, Outputs
from tfla.backends.gpu import exchanging, gate_gradients, reductions, results, sequences, state_passing
from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.family import KernelFamily
from tfla.backends.hopper import config, gate_warp, scheduler, small_head_launch
from tfla.backends.hopper.gate_warp import GateVectors
from tfla.backends.triton import denominators


def forward(ctx: LaunchContext) -> Outputs:
    """Launch the forward."""
    x, spec = ctx.x, ctx.spec
    h = ctx.new(*x.v.shape, dtype=x.v.dtype)
    ctx = exchanging.with_max_states(scheduler.launch(sequences.bound(ctx, h)))
    C, n, m = final = results.new_final_state(ctx)
    d = ctx.new(*x.log_f.shape) if spec.normalize and spec.save else None
    gates = gate_warp.launch(ctx, m_final=m)  # (G1) to (G5)
    starts, ends, stored = results.pad_state(ctx, x.C, x.n), (C, n), results.NO_STATE
    if ctx.segmented:
        starts = stored = segment_starts(ctx, gates, initial=starts, final=ends, m=m, exchange=ctx.exchange)
        ends = results.NO_STATE
    # o and d with C and n, (T1) to (T6).
    small_head_launch.launch_o(ctx, gates, h, d, initial=starts, final=ends)
    return results.forward_results(ctx, h, d, final, stored)


def segment_starts(
    ctx: LaunchContext, gates: GateVectors, initial: Pair, final: Pair, m: Tensor | None = None,
    exchange: Exchange | None = None,
) -> Pair:  # fmt: skip
    """Compute C and n at the starts of segments, (segments, H, K, V) and (segments, H, K).

    A scan computes what each segment adds to the states; state passing turns it into the states at segment starts.

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        initial: The initial states of the sequences, (N, H, K, V) and (N, H, K), or None.
        final: Outputs for the final states of the sequences, or None.
        m: The max states after the sequences, (N, H), or None; read by the exchange.
        exchange: The exchange with processes that have earlier steps, or None.
    """
    skip_last = final[0] is None and exchange is None
    C, n, decays = small_head_launch.launch_segment_states(
        ctx, gates, ctx.x.k, ctx.x.v, reverse=False, normalize=ctx.spec.normalize, skip_last=skip_last
    )  # fmt: skip
    if exchange is not None:
        initial = exchanging.exchange_states(ctx, exchange, C, n, decays, initial, m)
    state_passing.launch(ctx, C, decays, initial[0], final[0], reverse=False)
    if n is not None:
        state_passing.launch(ctx, n, decays, initial[1], final[1], reverse=False)
    return C, n


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
    starts = results.pad_state(ctx, x.C, x.n)
    dC, dn = dC_ends, dn_ends = results.final_cotangents(ctx, dC, dn)
    dC_starts, dn_starts = grads.dC0, grads.dn0
    if ctx.segmented:
        # C and n at segment starts, and dC at segment ends: what segments add, then state passing.
        starts = results.stored_starts(ctx, out) or segment_starts(ctx, gates, starts, results.NO_STATE)
        dC_ends, _, decays = small_head_launch.launch_segment_states(
            ctx, gates, x.q, dh, reverse=True, normalize=False, skip_last=grads.dC0 is None and ctx.exchange is None
        )  # fmt: skip
        if ctx.exchange is None:
            state_passing.launch(ctx, dC_ends, decays, dC, grads.dC0, reverse=True)
        dC_starts = dn_starts = None
    pending = None
    if ctx.exchange is not None and dC_ends is not None and not normalize:  # goes on while dq is computed
        pending = exchanging.start_cotangents(ctx, ctx.exchange, dC_ends, None, decays)
    # dq, (T7) to (T9), with q . dq and checkpoints of C and n.
    q_dq, checkpoints = small_head_launch.launch_dq(ctx, gates, dh, grads.dq, starts=starts, delta=delta)
    if ctx.segmented and normalize:  # dn at segment ends
        if delta:
            dn_ends = denominators.launch_segment_n(
                ctx, gates.vectors, x.q, reverse=True, skip_last=grads.dn0 is None and ctx.exchange is None
            )  # fmt: skip
        else:
            dn_ends = ctx.zeros(ctx.segments, ctx.H, ctx.K)
    if ctx.exchange is not None:
        assert dC_ends is not None
        if pending is None:
            pending = exchanging.start_cotangents(ctx, ctx.exchange, dC_ends, dn_ends, decays)
        dC, dn = exchanging.finish_cotangents(ctx, ctx.exchange, pending)
        state_passing.launch(ctx, dC_ends, decays, dC, grads.dC0, reverse=True)
    if ctx.segmented and dn_ends is not None:
        state_passing.launch(ctx, dn_ends, decays, dn, grads.dn0, reverse=True)
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
