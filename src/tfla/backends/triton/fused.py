"""The launches of the fused scans of Triton: one forward, one backward.

The equations are those of docs/mathematics.md. Gradients and results are named as in :mod:`tfla.backends.base`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from torch import Tensor

from tfla.backends.base import Exchange, Grads, Inputs, Outputs, Spec
from tfla.backends.gpu import (
    exchanging,
    gate_gradients,
    gate_kernels,
    reductions,
    results,
    segmentation,
    sequences,
    state_passing,
)
from tfla.backends.gpu.checkpoints import checkpoint_interval, checkpoint_shape
from tfla.backends.gpu.config import ceil_div, kernel_config, products
from tfla.backends.gpu.context import LaunchContext, Pair, fused_context
from tfla.backends.gpu.family import KernelFamily
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.triton import denominators, dq_dk, o_dv


def best_chunk_size(x: Inputs) -> int:
    """Return the chunk size of the smallest predicted time."""
    config = kernel_config(x)
    return segmentation.best_chunk_size(x, config, ceil_div(x.v.shape[3], config.o_dv.split))


def details(x: Inputs, chunk_size: int) -> dict[str, object]:
    """Return the sizes that :func:`tfla.explain` shows."""
    config = kernel_config(x)
    return {"tile": config.tile_steps, "segment": min(config.segment_steps(chunk_size), x.v.shape[1])}


def checkpoint_steps(x: Inputs, spec: Spec) -> int:
    """Return the number of steps between checkpoints; without a normalizer they are closer together."""
    dqk, dhv = int(x.q.shape[3]), int(x.v.shape[3])
    return checkpoint_interval(dqk, dhv, x.q.element_size(), kept=dqk * dhv, closer=not spec.normalize)


def signature(x: Inputs, spec: Spec) -> tuple[Hashable, ...]:
    """Return the choices that shapes, dtypes and options do not determine."""
    return kernel_config(x), checkpoint_steps(x, spec), products(x)


def context(recorder: LaunchRecorder, x: Inputs, spec: Spec) -> LaunchContext:
    """Return the context of a call."""
    return fused_context(
        recorder, x, spec, config=kernel_config(x), dims=(x.q.shape[3], x.v.shape[3]),
        checkpoint_steps=checkpoint_steps(x, spec), best_chunk_size=best_chunk_size,
    )  # fmt: skip


def forward(ctx: LaunchContext) -> Outputs:
    """Launch the forward."""
    x, h = ctx.x, results.new_h(ctx)
    ctx = exchanging.with_max_states(sequences.bound(ctx, h))
    out = results.new_outputs(ctx, h)
    gates = gate_kernels.launch(ctx, m_final=out.m)  # (G1) to (G5)
    starts, ends, stored = results.initial_states(ctx), (out.C, out.n), results.NO_STATE
    if ctx.segmented:
        starts = stored = segment_starts(ctx, gates, initial=starts, final=ends, m=out.m, exchange=ctx.exchange)
        ends = results.NO_STATE
    # d, (T3), n, (T6); then o and C, (T1), (T2), (T5).
    if ctx.spec.normalize:
        denominators.launch(ctx, gates, initial=starts[1], final=ends[1], d=out.d)
    o_dv.launch(ctx, gates, x.k, x.v, x.q, out.h, reverse=False, initial=starts[0], final=ends[0])
    return results.forward_results(ctx, out, stored)


def segment_starts(
    ctx: LaunchContext, gates: Tensor, initial: Pair, final: Pair, m: Tensor | None = None,
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
    x, skip_last = ctx.x, final[0] is None and exchange is None
    C, decays = o_dv.launch_segment_states(ctx, gates, x.k, x.v, reverse=False, skip_last=skip_last)
    n = None
    if exchange is None:
        indexed = ctx.rows is not None
        state_passing.launch(ctx, C, decays, initial[0], final[0], reverse=False, indexed=indexed)
    if ctx.spec.normalize:
        n = denominators.launch_segment_n(ctx, gates, x.k, reverse=False, skip_last=skip_last)
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
    grads = results.new_gradients(ctx, shares=ctx.group)
    ctx = sequences.bound(ctx, *grads.of_steps())
    gates = gate_kernels.launch_backward(ctx, out, dh)  # with (T7)
    starts = results.pad_state(ctx, x.C, x.n)
    dC, dn = dC_ends, dn_ends = results.final_cotangents(ctx, dC, dn)
    dC_starts, dn_starts, pending = grads.dC0, grads.dn0, None
    if ctx.segmented:
        # C and n at segment starts, and dC at segment ends: what segments add, then state passing.
        starts = results.stored_starts(ctx, out) or segment_starts(ctx, gates, starts, results.NO_STATE)
        dC_ends, decays = o_dv.launch_segment_states(
            ctx, gates, x.q, dh, reverse=True, skip_last=grads.dC0 is None and ctx.exchange is None
        )
        pending = exchanging.pass_cotangents(ctx, dC_ends, decays, dC, first=grads.dC0)  # goes on beside dq
        dC_starts = dn_starts = None
    # dq, (T8), (T9), with checkpoints of C and n. The memory of dv, which is computed last, holds those of C and dC.
    q_dq, checkpoints = dq_dk.launch(
        ctx, gates, x.k, x.v, dh, x.q, grads.dq, reverse=False, delta=delta, initial=starts, final=results.NO_STATE,
        memory=grads.dv,
    )  # fmt: skip
    if ctx.segmented and normalize:  # dn at segment ends
        skip_last = grads.dn0 is None and ctx.exchange is None
        dn_ends = denominators.launch_segment_dn(ctx, gates, delta=delta, skip_last=skip_last)
    dC = exchanging.finish_cotangents(ctx, pending, dC)
    if ctx.segmented and dn_ends is not None:
        pending = exchanging.pass_cotangents(ctx, dn_ends, decays, dn, first=grads.dn0, of_n=True)
        exchanging.finish_cotangents(ctx, pending, dn)
    # dk, (T8), (T10), with checkpoints of dC and dn; then dv, (T11), (T12).
    size = math.prod(checkpoint_shape(ctx))
    k_dk, cotangents = dq_dk.launch(
        ctx, gates, x.q, dh, x.v, x.k, grads.dk, reverse=True, delta=delta, initial=(dC_ends, dn_ends),
        final=(dC_starts, dn_starts), memory=grads.dv, offset=ceil_div(size, 128) * 128,
    )  # fmt: skip
    dots = gate_gradients.launch_checkpoint_dots(ctx, checkpoints, cotangents)
    o_dv.launch(ctx, gates, x.q, dh, x.k, grads.dv, reverse=True, initial=dC_ends, final=None)
    # di and df, (D1) to (D3); then sums over the heads that share q and k.
    gate_gradients.launch(
        ctx, gates, q_dq, k_dk, dots, starts, (dC_ends, dn_ends), grads, final_cotangent=dC is not None
    )
    if 0 < size <= grads.dv.numel():  # checkpoints have overwritten the zeros at steps of no sequence
        sequences.clear(ctx, grads.dv)
    dq, dk = (reductions.launch(ctx, t, ctx.group) for t in (grads.dq, grads.dk))
    return results.backward_results(ctx, dq, dk, grads)


FAMILY = KernelFamily(name="triton fused", signature=signature, context=context, forward=forward, backward=backward)
