"""The exchange of states among processes, between the pass over segments and state passing (context parallelism).

The states before this process's steps are not known when the pass over segments starts, and it does not need them. Its
results, summed over the segments, are what processes exchange; state passing then starts from the states that come in.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tfla.backends.base import Exchange
from tfla.backends.gpu import results, span_kernels, state_passing
from tfla.backends.gpu.context import LaunchContext, Pair


def with_max_states(ctx: LaunchContext) -> LaunchContext:
    """Return the context with the max states before this process's steps in place of the given ones.

    They are exchanged first, two numbers for each head, because the pass over segments is stabilized with them. The
    context is returned as it is where there is no exchange or no normalizer.
    """
    if ctx.exchange is None or not ctx.spec.normalize:
        return ctx
    return replace(ctx, x=ctx.x._replace(m=span_kernels.launch_max_states(ctx, ctx.exchange)))


def exchange_states(
    ctx: LaunchContext, exchange: Exchange, C: Tensor, n: Tensor | None, decays: Tensor, initial: Pair, m: Tensor | None
) -> Pair:
    """Return the states before this process's steps, (N, H, K, V) and (N, H, K).

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        C, n: What segments add, (segments, H, K, V) and (segments, H, K).
        decays: The decays over segments, (segments, H).
        initial: The given initial states of whole sequences, or None.
        m: The max states after the steps, (N, H), or None.
    """
    rows = span_kernels.launch_own_states(ctx, exchange, C, n, decays, initial, m)
    gathered = ctx.do(exchange.finish, ctx.do(exchange.start, rows))
    found = span_kernels.launch_starts(ctx, exchange, gathered, initial)
    ctx.exchanged.extend(found)
    return found.C, None if n is None else found.n


def start_cotangents(ctx: LaunchContext, exchange: Exchange, dC: Tensor, dn: Tensor | None, decays: Tensor) -> Tensor:
    """Start the exchange of cotangents and return what :func:`finish_cotangents` takes, which nothing else may read.

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        dC, dn: What segments add, (segments, H, K, V) and (segments, H, K).
        decays: The decays over segments, (segments, H).
    """
    _, _, final_m, final_dC, final_dn = ctx.saved
    final = [results.dense(ctx, t) if t.numel() else None for t in (final_dC, final_dn)]
    rows = span_kernels.launch_own_cotangents(ctx, exchange, dC, dn, decays, (final[0], final[1]), final_m)
    gathered: Tensor = ctx.do(exchange.start, rows)
    return gathered


def finish_cotangents(ctx: LaunchContext, exchange: Exchange, gathered: Tensor) -> Pair:
    """Return the cotangents of the states after this process's steps, (N, H, K, V) and (N, H, K)."""
    last_m, log_decays, final_m, _, _ = ctx.saved
    gathered = ctx.do(exchange.finish, gathered)
    return span_kernels.launch_ends(ctx, exchange, gathered, last_m, log_decays, final_m)


def pass_cotangents(
    ctx: LaunchContext, exchange: Exchange, pending: Tensor | None, dC: Tensor | None, dn: Tensor | None,
    decays: Tensor, *, final: Tensor | None,
) -> Pair:  # fmt: skip
    """Finish the exchange of cotangents, and pass dC from segment to segment, in place.

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        pending: The result of :func:`start_cotangents`, or None where the exchange has not started.
        dC, dn: What segments add, (segments, H, K, V) and (segments, H, K).
        decays: The decays over segments, (segments, H).
        final: Output for the cotangents of the initial C, (N, H, K, V), or None.

    Returns:
        The cotangents of the states after this process's steps, (N, H, K, V) and (N, H, K).
    """
    assert dC is not None
    if pending is None:
        pending = start_cotangents(ctx, exchange, dC, dn, decays)
    dC_final, dn_final = finish_cotangents(ctx, exchange, pending)
    state_passing.launch(ctx, dC, decays, dC_final, final, reverse=True)
    return dC_final, dn_final
