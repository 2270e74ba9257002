"""The functions of gated linear attention (arXiv 2312.06635), with one gate for each step, head and key channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.integrations.fla.options import check_options, read_state_layout, refuse
from tfla.integrations.fla.scan import log_decays, scan
from tfla.ops.checks import check_float, check_shape

__all__ = ["chunk_gla", "fused_recurrent_gla"]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention.

        C_t = diag(exp(g_t)) C_{t-1} + k_t v_t^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K).
        v: (B, T, H, V).
        g: (B, T, H, K), log-decays in any float dtype.
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), or (N, H, V, K) with `state_v_first`, the states before the first steps; zeros if
            None.
        output_final_state: also return the states after the last steps, in the same layout.
        state_v_first: states have V before K.
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu: accepted without effect.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    _check_gates("g", g, q, v)
    return scan(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention, with `reverse` from the last step of each sequence to its first.

    The arguments that are not listed here, the results and the errors are those of :func:`chunk_gla`.

    Args:
        gk: (B, T, H, K), log-decays; None is no decay.
        gv: not supported; None.
        reverse: `initial_state` precedes the last step in this order, and the final state is the one after the first
            step.
        kwargs: those of :func:`~tfla.integrations.fla.fused_recurrent_simple_gla`.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    check_options(fused_recurrent_gla, kwargs)
    refuse(gv=gv)
    if gk is None:
        gk = log_decays(None, None, v)
    else:
        _check_gates("gk", gk, q, v)
    return scan(
        q, k, v, gk, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse, state_v_first=state_v_first
    )


def _check_gates(name: str, g: Tensor, q: Tensor, v: Tensor) -> None:
    """Check that log-decays are (B, T, H, K)."""
    check_float("q", q)
    check_float("v", v)
    check_shape("v", v, ("B", "T", "H", "V"))
    check_float(name, g)
    check_shape(name, g, (*v.shape[:3], q.shape[-1]))
