"""The functions of Gated DeltaNet (arXiv 2412.06464), the delta rule with one decay for each step and head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.integrations.fla.delta_scan import beta_activation, delta_scan, gate_options
from tfla.integrations.fla.options import check_options, read_state_layout, refuse, require_tensors
from tfla.integrations.fla.scan import check_gates

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule.

        C'_t = exp(g_t) C_{t-1}        C_t = C'_t + beta_t k_t (v_t - C'_t^T k_t)^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K). H divides HV.
        v: (B, T, HV, V).
        g: (B, T, HV), log-decays in any float dtype.
        beta: (B, T, HV).
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, HV, K, V), or (N, HV, V, K) with `state_v_first`, the states before the first steps; zeros if
            None.
        output_final_state: also return the states after the last steps, in the same layout.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(their squared norm + 1e-6).
        use_beta_sigmoid_in_kernel: beta is the argument of a sigmoid.
        allow_neg_eigval: beta is 2 sigmoid(beta), with `use_beta_sigmoid_in_kernel`.
        state_v_first: states have V before K.
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu, chunk_indices: accepted without effect.
        cp_context: not supported; None.
        kwargs: `use_gate_in_kernel`, for log-decays -exp(A_log) softplus(g + dt_bias), with `A_log` (HV,) and `dt_bias`
            (HV,) or None; `chunk_size` (a power of 2) and `head_first=False`, accepted without effect; and
            `transpose_state_layout`, the deprecated name of `state_v_first`.

    Returns:
        o (B, T, HV, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit or is unknown; the message names it, what it is and what is
            allowed.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    gates = [kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")]
    check_options(chunk_gated_delta_rule, kwargs)
    refuse(cp_context=cp_context)
    options = gate_options(g, *gates)
    options["beta_activation"] = beta_activation(use_beta_sigmoid_in_kernel, allow_neg_eigval, beta)
    require_tensors(g=g, beta=beta)
    check_gates("g", g, q, v, by_channel=False)
    return delta_scan(
        q, k, v, beta, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first,
        normalize_qk=use_qk_l2norm_in_kernel, **options,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, also with a decay for each key channel.

    The arguments that are not listed here, the results and the errors are those of :func:`chunk_gated_delta_rule`.

    Args:
        g: (B, T, HV), log-decays; None is no decay.
        gk: (B, T, HV, K), log-decays of key channels instead of `g`, or None.
        gv: not supported; None.
        beta: (B, T, HV); None is 1.
        use_gate_in_kernel, A_log, dt_bias: the activation of `g`.
        kwargs: those of :func:`~tfla.integrations.fla.fused_recurrent_simple_gla`.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    check_options(fused_recurrent_gated_delta_rule, kwargs)
    refuse(gv=gv)
    if gk is not None and (g is not None or use_gate_in_kernel):
        raise ValueError("gk: got a tensor beside g or use_gate_in_kernel, expected one of them at most")
    if g is not None:
        check_gates("g", g, q, v, by_channel=False)
    if gk is not None:
        check_gates("gk", gk, q, v, by_channel=True)
    return delta_scan(
        q, k, v, beta, g if gk is None else gk, scale, initial_state, output_final_state, cu_seqlens, state_v_first,
        normalize_qk=use_qk_l2norm_in_kernel,
        beta_activation=beta_activation(use_beta_sigmoid_in_kernel, allow_neg_eigval, beta),
        **gate_options(g, use_gate_in_kernel, A_log, dt_bias),
    )  # fmt: skip
