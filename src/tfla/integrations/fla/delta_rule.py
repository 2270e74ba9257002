"""The functions of DeltaNet, the delta rule (arXiv 2406.06484) without a decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.integrations.fla.delta_scan import delta_scan
from tfla.integrations.fla.options import check_options, require_tensors

__all__ = ["chunk_delta_rule", "fused_recurrent_delta_rule"]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule.

        C_t = C_{t-1} + beta_t k_t (v_t - C_{t-1}^T k_t)^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K).
        v: (B, T, H, V).
        beta: (B, T, H).
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), the states before the first steps; zeros if None.
        output_final_state: also return the states after the last steps.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(their squared norm + 1e-6).
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu: accepted without effect.
        kwargs: `chunk_size` (a power of 2) and `head_first=False`, accepted without effect.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit or is unknown; the message names it, what it is and what is
            allowed.
    """
    check_options(chunk_delta_rule, kwargs)
    require_tensors(beta=beta)
    return delta_scan(
        q, k, v, beta, None, scale, initial_state, output_final_state, cu_seqlens, normalize_qk=use_qk_l2norm_in_kernel
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as :func:`chunk_delta_rule`; beta None is 1.

    The arguments, the results and the errors are those of that function.
    """
    return delta_scan(
        q, k, v, beta, None, scale, initial_state, output_final_state, cu_seqlens, normalize_qk=use_qk_l2norm_in_kernel
    )
