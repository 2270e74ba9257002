"""The launches of the paper's kernels: states at the starts of chunks, then all results of each chunk in parallel."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from tfla.backends.base import Grads, Inputs, Outputs, Spec
from tfla.backends.gpu import gate_kernels, reductions, results, sequences
from tfla.backends.gpu.config import kernel_config, products
from tfla.backends.gpu.context import LaunchContext, count_segments, new_context
from tfla.backends.gpu.family import KernelFamily
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.triton.paper import block_sizes, gate_gradients, parallel, recurrent


def signature(x: Inputs, spec: Spec) -> tuple[Hashable, ...]:
    """Return the choices that shapes, dtypes and options do not determine."""
    return block_sizes.choose(x, spec.chunk_size), products(x)


def context(recorder: LaunchRecorder, x: Inputs, spec: Spec) -> LaunchContext:
    """Return the context of a call, whose segments are the paper's chunks."""
    steps = block_sizes.chunk_steps(x, spec.chunk_size)
    return new_context(
        recorder, x, spec, config=kernel_config(x), dims=(x.q.shape[3], x.v.shape[3]),
        L=block_sizes.choose(x, spec.chunk_size).steps, segment_steps=steps, segments=count_segments(x, steps),
        checkpoint_steps=steps,  # the starts of chunks are the only checkpoints
    )  # fmt: skip


def forward(ctx: LaunchContext) -> Outputs:
    """Launch the forward."""
    h = results.new_h(ctx)
    ctx = sequences.bound(ctx, h)
    x = ctx.x
    out = results.new_outputs(ctx, h)
    gates = gate_kernels.launch(ctx, m_final=out.m)  # (G1) to (G5)
    initial = results.initial_states(ctx)
    # C and n at the starts of chunks, one chunk after the other; then h and d, all chunks in parallel.
    starts = recurrent.launch(ctx, gates, x.k, x.v, reverse=False, initial=initial, final=(out.C, out.n))
    parallel.launch_output(ctx, gates, x.q, x.k, x.v, out.h, reverse=False, states=starts, d=out.d)
    return results.forward_results(ctx, out, starts)


def backward(ctx: LaunchContext, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None) -> Grads:
    """Launch the backward.

    Args:
        ctx: The context of the call.
        out: The results of the forward.
        dh: The cotangent of h, (B, T, H, dhv).
        dC, dn: The cotangents of the final states, (N, H, dqk, dhv) and (N, H, dqk), or None.
    """
    x, delta = ctx.x, ctx.spec.normalize and ctx.spec.normalizer_grad
    dh = results.dense_rows(ctx, dh)
    grads = results.new_gradients(ctx, shares=ctx.group)
    ctx = sequences.bound(ctx, *grads.of_steps())
    gates = gate_kernels.launch_backward(ctx, out, dh)  # with (T7)
    initial, final = results.pad_state(ctx, x.C, x.n), results.final_cotangents(ctx, dC, dn)
    # C and n at the starts of chunks, dC and dn at their ends.
    starts = results.stored_starts(ctx, out)
    if starts is None:
        starts = recurrent.launch(ctx, gates, x.k, x.v, reverse=False, initial=initial, final=results.NO_STATE)
    ends = recurrent.launch(ctx, gates, x.q, dh, reverse=True, initial=final, final=(grads.dC0, grads.dn0), delta=delta)
    # dv, dq with q . dq, dk with k . dk.
    parallel.launch_output(ctx, gates, x.k, x.q, dh, grads.dv, reverse=True, states=ends)
    q_dq = parallel.launch_qk_gradient(
        ctx, gates, dh, x.v, x.k, x.q, grads.dq, reverse=False, states=starts, delta=delta
    )
    k_dk = parallel.launch_qk_gradient(ctx, gates, x.v, dh, x.q, x.k, grads.dk, reverse=True, states=ends, delta=delta)
    # di and df, (D1) to (D3); then sums over the heads that share q and k.
    gate_gradients.launch(ctx, gates, q_dq, k_dk, starts, ends, grads, final_cotangent=final[0] is not None)
    dq, dk = (reductions.launch(ctx, t, ctx.group) for t in (grads.dq, grads.dk))
    return results.backward_results(ctx, dq, dk, grads)


FAMILY = KernelFamily(name="triton tfla", signature=signature, context=context, forward=forward, backward=backward)
