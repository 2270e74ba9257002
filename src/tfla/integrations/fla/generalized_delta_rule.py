"""The function of the delta rule with a diagonal plus low-rank transition (DPLR)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tfla
from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.delta_scan import final_state
from tfla.integrations.fla.options import check_options, refuse
from tfla.integrations.fla.scan import check_gates, key_first

__all__ = ["chunk_dplr_delta_rule"]


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a recurrence with a diagonal plus low-rank transition.

        C_t = diag(exp(gk_t)) C_{t-1} + b_t (C_{t-1}^T a_t)^T + k_t v_t^T        o_t = scale C_t^T q_t

    Args:
        q, k, a, b: (B, T, H, K).
        v: (B, T, H, V).
        gk: (B, T, H, K), log-decays in any float dtype; no decay is too small.
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), the states before the first steps; zeros if None.
        output_final_state: also return the states after the last steps.
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        safe_gate, chunk_size, disable_recompute, lower_bound, cu_seqlens_cpu: accepted without effect.
        cp_context: not supported; None.
        kwargs: `head_first=False`, accepted without effect.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit or is unknown; the message names it, what it is and what is
            allowed.
    """
    check_options(chunk_dplr_delta_rule, kwargs)
    check_flags(output_final_state=output_final_state, safe_gate=safe_gate, disable_recompute=disable_recompute)
    refuse(cp_context=cp_context)
    check_gates("gk", gk, q, v, by_channel=True)
    state = None
    if initial_state is not None:
        state = tfla.State(key_first(initial_state, q, v, cu_seqlens, False))
    o, last = tfla.dplr(q, k, v, a, b, gk, scale=scale, initial_state=state, return_state=True, cu_seqlens=cu_seqlens)
    return o, final_state(last, output_final_state)
