"""The states at the starts of segments, by a scan of what each segment adds to them and by state passing.

Both families of Hopper kernels have a scan of segments of their own.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import Exchange, Outputs
from tfla.backends.gpu import exchanging, results, state_passing
from tfla.backends.gpu.context import LaunchContext, Pair

# What a scan of segments computes: what each segment adds to C and n, and the decays over segments; or None.
Scan = tuple[Tensor, Tensor | None, Tensor] | None


def of_forward(ctx: LaunchContext, out: results.NewOutputs, scan: Scan) -> tuple[Pair, Pair, Pair]:
    """Compute what the scans of a forward start from.

    Args:
        ctx: The context of the call.
        out: The outputs of the forward.
        scan: What segments add, or None where sequences are not cut.

    Returns:
        The states C and n that scans start from; the outputs for the states that they end with; the states at segment
        starts that are stored for the backward, or None.
    """
    initial, final = results.initial_states(ctx), (out.C, out.n)
    if scan is None:
        return initial, final, results.NO_STATE
    starts = _pass_states(ctx, scan, initial, final, m=out.m, exchange=ctx.exchange)
    return starts, results.NO_STATE, starts


def of_backward(ctx: LaunchContext, out: Outputs, scan: Scan) -> Pair:
    """Return the states C and n that the scans of a backward start from: those that the forward stored, or the same.

    Args:
        ctx: The context of the call.
        out: The results of the forward.
        scan: What segments add, or None where it is not needed, see :func:`needs_scan`.
    """
    initial = results.pad_state(ctx, ctx.x.C, ctx.x.n)
    if scan is not None:
        return _pass_states(ctx, scan, initial, results.NO_STATE)
    return results.stored_starts(ctx, out) or initial if ctx.segmented else initial


def needs_scan(ctx: LaunchContext) -> bool:
    """Return whether a backward has to compute the states at segment starts again."""
    return ctx.segmented and not ctx.stores_segment_states


def _pass_states(
    ctx: LaunchContext, scan: tuple[Tensor, Tensor | None, Tensor], initial: Pair, final: Pair,
    m: Tensor | None = None, exchange: Exchange | None = None,
) -> Pair:  # fmt: skip
    """Turn what segments add into C and n at their starts, (segments, H, K, V) and (segments, H, K), in place.

    Args:
        ctx: The context of the call.
        scan: What segments add.
        initial: The initial states of the sequences, (N, H, K, V) and (N, H, K), or None.
        final: Outputs for the final states of the sequences, or None.
        m: The max states after the sequences, (N, H), or None; read by the exchange.
        exchange: The exchange with processes that have earlier steps, or None.
    """
    C, n, decays = scan
    if exchange is not None:
        initial = exchanging.exchange_states(ctx, exchange, C, n, decays, initial, m)
    for states, given, end in zip((C, n), initial, final, strict=True):
        if states is not None:
            indexed = ctx.rows is not None and states is C
            state_passing.launch(ctx, states, decays, given, end, reverse=False, indexed=indexed)
    return C, n
