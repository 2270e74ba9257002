"""The function of Gated DeltaProduct (arXiv 2502.10297), the gated delta rule with several writes in each step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tfla
from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.delta_scan import final_state
from tfla.integrations.fla.options import refuse, require_tensors
from tfla.integrations.fla.scan import check_gates, key_first
from tfla.nn.validation import check_int

__all__ = ["chunk_gated_delta_product"]


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute Gated DeltaProduct: a decay, `num_householder` writes of the delta rule, and a read in each step.

    Args:
        q: (B, T, H, K).
        k: (B, T x num_householder, H, K).
        v: (B, T x num_householder, H, V).
        g: (B, T, H), log-decays in any float dtype, or None.
        beta: (B, T x num_householder, H).
        num_householder: the number of writes in each step.
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), the states before the first steps; zeros if None.
        output_final_state: also return the states after the last steps.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(their squared norm + 1e-6).
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu: accepted without effect.
        cp_context: not supported; None.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    refuse(cp_context=cp_context)
    require_tensors(beta=beta)
    check_flags(output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if g is not None:
        check_gates("g", g, q, v, by_channel=False)
    check_int("num_householder", num_householder, 1)
    state = None
    if initial_state is not None:
        state = tfla.State(key_first(initial_state, q, v, cu_seqlens, False))
    o, last = tfla.delta_product(
        q, k, v, beta, g, writes=num_householder, normalize_qk=bool(use_qk_l2norm_in_kernel), scale=scale,
        initial_state=state, return_state=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, final_state(last, output_final_state)
