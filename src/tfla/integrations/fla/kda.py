"""The functions of Kimi Delta Attention (arXiv 2510.26692), the delta rule with a decay for each key channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.delta_scan import beta_activation, delta_scan, gate_options
from tfla.integrations.fla.options import check_options, read_state_layout, refuse, require_tensors
from tfla.integrations.fla.scan import check_gates

__all__ = ["chunk_kda", "fused_recurrent_kda"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi Delta Attention.

        C'_t = diag(exp(g_t)) C_{t-1}        C_t = C'_t + beta_t k_t (v_t - C'_t^T k_t)^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K). H divides HV.
        v: (B, T, HV, V).
        g: (B, T, HV, K), log-decays in any float dtype; no decay is too small.
        beta: (B, T, HV).
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, HV, K, V), or (N, HV, V, K) with `state_v_first`, the states before the first steps; zeros if
            None.
        output_final_state: also return the states after the last steps, in the same layout.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(their squared norm + 1e-6).
        use_gate_in_kernel: log-decays are -exp(A_log) softplus(g + dt_bias), or with `lower_bound` they are
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is the argument of a sigmoid.
        allow_neg_eigval: beta is 2 sigmoid(beta), with `use_beta_sigmoid_in_kernel`.
        safe_gate: requires `lower_bound` with `use_gate_in_kernel`, without another effect: no decay is too small.
        lower_bound: the smallest log-decay of `use_gate_in_kernel`.
        state_v_first: states have V before K.
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        disable_recompute, cu_seqlens_cpu, max_num_seqs: accepted without effect.
        return_intermediate_states, cp_context, use_graph: not supported; False or None.
        kwargs: `A_log` (HV,) and `dt_bias` (HV x K,) of `use_gate_in_kernel`; `chunk_size` (a power of 2) and
            `head_first=False`, accepted without effect; and `transpose_state_layout`, the deprecated name of
            `state_v_first`.

    Returns:
        o (B, T, HV, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit or is unknown; the message names it, what it is and what is
            allowed.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    check_options(chunk_kda, kwargs)
    check_flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
    refuse(return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph)
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound: got None with safe_gate=True and use_gate_in_kernel=True, expected a number")
    return fused_recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as :func:`chunk_kda`, with `A_log` and `dt_bias` as arguments of their own.

    The other arguments, the results and the errors are those of that function.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    check_options(fused_recurrent_kda, kwargs)
    options = gate_options(g, use_gate_in_kernel, _of_heads(A_log), _by_channel(dt_bias, q, v), lower_bound)
    options["beta_activation"] = beta_activation(use_beta_sigmoid_in_kernel, allow_neg_eigval, beta)
    require_tensors(g=g, beta=beta)
    check_gates("g", g, q, v, by_channel=True)
    return delta_scan(
        q, k, v, beta, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first,
        normalize_qk=use_qk_l2norm_in_kernel, **options,
    )  # fmt: skip


def _of_heads(A_log: Tensor | None) -> Tensor | None:
    """Return A_log as (HV,); models store it with further dimensions of 1."""
    return A_log.flatten() if isinstance(A_log, Tensor) else A_log  # the operator refuses what is no tensor


def _by_channel(dt_bias: Tensor | None, q: Tensor, v: Tensor) -> Tensor | None:
    """Return the bias (HV x K,) as (HV, K).

    Raises:
        ValueError: the bias has another number of elements.
    """
    if not all(isinstance(t, Tensor) for t in (dt_bias, q, v)) or not q.dim() == v.dim() == 4:
        return dt_bias  # the operator refuses the argument that does not fit
    assert dt_bias is not None
    shape = (v.shape[2], q.shape[3])
    if dt_bias.numel() != shape[0] * shape[1]:
        raise ValueError(f"dt_bias: got shape {tuple(dt_bias.shape)}, expected ({shape[0] * shape[1]},)")
    return dt_bias.reshape(shape)
