"""The exchange of states among processes, between the pass over segments and state passing (context parallelism).

The states before this process's steps are not known when the pass over segments starts, and it does not need them. Its
results, summed over the segments, are what processes exchange; state passing then starts from the states that come in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

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


class Pending(NamedTuple):
    """Cotangents whose exchange goes on; its tensors may only be read by :func:`finish_cotangents`."""

    gathered: Tensor  # the rows of all processes
    adds: Tensor  # what segments add to dC or dn
    decays: Tensor  # the decays over segments
    first: Tensor | None  # output for the cotangents of the initial states


def pass_cotangents(
    ctx: LaunchContext, adds: Tensor, decays: Tensor, final: Tensor | None, *, first: Tensor | None, of_n: bool = False
) -> Pending | None:
    """Pass cotangents from segment to segment, in place, or with an exchange start it and leave them as they are.

    The cotangents of C and of n are exchanged one after the other, because dn follows from delta, (T7), which a kernel
    may compute with dv, from dC.

    Args:
        ctx: The context of the call.
        adds: What segments add to dC, (segments, H, K, V), or to dn, (segments, H, K).
        decays: The decays over segments, (segments, H).
        final: The cotangents of the final states, (N, H, ...), or None; with an exchange they come from the context.
        first: Output for the cotangents of the initial states, (N, H, ...), or None.
        of_n: Whether the cotangents are dn.

    Returns:
        What :func:`finish_cotangents` takes, None without an exchange.
    """
    if ctx.exchange is None:
        state_passing.launch(ctx, adds, decays, final, first, reverse=True)
        return None
    _, _, final_m, *finals = ctx.saved
    given = finals[1 if of_n else 0]
    own = results.dense(ctx, given) if given.numel() else None
    rows = span_kernels.launch_own_cotangents(ctx, ctx.exchange, adds, decays, own, final_m)
    return Pending(ctx.do(ctx.exchange.start, rows), adds, decays, first)


def finish_cotangents(ctx: LaunchContext, pending: Pending | None, final: Tensor | None) -> Tensor | None:
    """Finish the exchange of cotangents, and pass them from segment to segment, in place.

    Args:
        ctx: The context of the call.
        pending: The result of :func:`pass_cotangents`.
        final: The cotangents of the final states, (N, H, ...), or None.

    Returns:
        The cotangents of the states after this process's steps, (N, H, ...); `final` without an exchange.
    """
    if pending is None or ctx.exchange is None:
        return final
    last_m, log_decays, final_m, _, _ = ctx.saved
    gathered = ctx.do(ctx.exchange.finish, pending.gathered)
    ends = span_kernels.launch_ends(ctx, ctx.exchange, gathered, pending.adds, last_m, log_decays, final_m)
    state_passing.launch(ctx, pending.adds, pending.decays, ends, pending.first, reverse=True)
    return ends
