"""The function of Comba (arXiv 2506.02475), the gated delta rule with a read key of its own.

As in the kernels of the package, the state is read before its decay. Its `naive_recurrent_comba` reads after it.
"""

from __future__ import annotations

from torch import Tensor

from tfla.integrations.fla.delta_scan import delta_scan
from tfla.integrations.fla.options import require_tensors
from tfla.integrations.fla.scan import check_gates
from tfla.ops.checks import check_float, check_shape

__all__ = ["chunk_comba"]


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute Comba.

        C_t = exp(g_t) C_{t-1} + beta_t k_t (v_t - C_{t-1}^T p_t)^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K). H divides HV.
        v: (B, T, HV, V).
        p: (B, T, H, K), the read keys; None is k.
        g: (B, T, HV), log-decays in any float dtype.
        beta: (B, T, HV). It is required: the kernels of the package fail on its default, None.
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, HV, K, V), the states before the first steps; zeros if None.
        output_final_state: also return the states after the last steps.
        use_qk_l2norm_in_kernel: divide q, k and p by sqrt(their squared norm + 1e-6).
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu: accepted without effect.

    Returns:
        o (B, T, HV, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    require_tensors(g=g, beta=beta)
    check_gates("g", g, q, v, by_channel=False)
    if p is not None and isinstance(k, Tensor):
        check_float("p", p)
        check_shape("p", p, tuple(k.shape))
    return delta_scan(
        q, k, v, beta, g, scale, initial_state, output_final_state, cu_seqlens, normalize_qk=use_qk_l2norm_in_kernel,
        read_key=p, read_before_decay=True,
    )  # fmt: skip
