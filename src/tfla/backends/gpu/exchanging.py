"""The exchange of states among processes, between the pass over segments and state passing (context parallelism).

The states before this process's steps are not known when the pass over segments starts, and it does not need them. Its
results, summed over the segments, are what processes exchange; state passing then starts from the states that come in.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tfla.backends.base import Exchange
from tfla.backends.gpu import state_passing
from tfla.backends.gpu.context import LaunchContext, Pair


def _total_decay(ctx: LaunchContext, decays: Tensor) -> Tensor:
    """Return the decays over whole sequences, (N, H), from those over segments."""
    found: Tensor = ctx.do(lambda t: t.unflatten(0, (ctx.x.sequences, -1)).prod(1), decays)
    return found


def _split(ctx: LaunchContext, rows: Tensor) -> Pair:
    """Return C and n, or their cotangents, of rows (N, H, K V + K)."""
    size = ctx.K * ctx.V
    C = ctx.do(lambda t: t[..., :size].unflatten(-1, (ctx.K, ctx.V)).contiguous(), rows)
    return C, ctx.do(lambda t: t[..., size:].contiguous(), rows) if ctx.spec.normalize else None


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
    own_C = state_passing.launch_final(ctx, C, decays, initial[0], reverse=False)
    own_n = None if n is None else state_passing.launch_final(ctx, n, decays, initial[1], reverse=False)
    total, m0 = _total_decay(ctx, decays), ctx.x.m
    if own_n is None:
        gathered = ctx.do(lambda C, total: exchange.states(C, None, None, None, total), own_C, total)
    else:
        gathered = ctx.do(exchange.states, own_C, own_n, m, m0, total)
    read = [t for t in (m0, *initial) if t is not None]
    given = tuple(t is not None for t in (m0, *initial))
    starts = ctx.do(partial(_starts, exchange, given), gathered, *read)
    ctx.exchanged.extend((gathered, starts))
    return _split(ctx, starts)


def _starts(exchange: Exchange, given: tuple[bool, ...], gathered: Tensor, *read: Tensor) -> Tensor:
    """Return the incoming states from the tensors that are given."""
    left = list(read)
    m0, C, n = (left.pop(0) if there else None for there in given)
    return exchange.starts(gathered, m0, C, n)


def exchange_cotangents(ctx: LaunchContext, exchange: Exchange, dC: Tensor, dn: Tensor | None, decays: Tensor) -> Pair:
    """Return the cotangents of the states after this process's steps, (N, H, K, V) and (N, H, K).

    Args:
        ctx: The context of the call.
        exchange: The exchange.
        dC, dn: What segments add, (segments, H, K, V) and (segments, H, K).
        decays: The decays over segments, (segments, H).
    """
    own = [state_passing.launch_final(ctx, t, decays, None, reverse=True) for t in (dC, dn) if t is not None]
    if dn is None:
        rows = ctx.do(lambda dC, *saved: exchange.cotangents(dC, None, *saved), *own, *ctx.saved)
    else:
        rows = ctx.do(exchange.cotangents, *own, *ctx.saved)
    return _split(ctx, rows)
