"""The call of tfla's delta rule from the arguments of flash-linear-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tfla
from tfla.backends.delta import BetaActivation
from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.scan import key_first, state_of_step


def beta_activation(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, beta: object) -> BetaActivation:
    """Return the activation of beta that two flags of the package stand for.

    Raises:
        TypeError: a value is not a flag.
        ValueError: `allow_neg_eigval` is given without `use_beta_sigmoid_in_kernel`, or this without `beta`.
    """
    check_flags(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: got True, expected it with use_beta_sigmoid_in_kernel=True")
    if not use_beta_sigmoid_in_kernel:
        return "none"
    if beta is None:
        raise ValueError("beta: got None with use_beta_sigmoid_in_kernel=True, expected a tensor")
    return "2sigmoid" if allow_neg_eigval else "sigmoid"


def gate_options(
    g: object, use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> dict[str, Any]:
    """Return the options of :func:`tfla.delta_rule` for the activation of the gates `g`; none without it.

    Raises:
        TypeError: `use_gate_in_kernel` is not a flag.
        ValueError: `g` is missing, or `A_log` without `lower_bound`.
    """
    check_flags(use_gate_in_kernel=use_gate_in_kernel)
    if not use_gate_in_kernel:
        return {}
    if g is None:
        raise ValueError("g: got None with use_gate_in_kernel=True, expected a tensor")
    kind = "softplus" if lower_bound is None else "sigmoid"
    if A_log is None and kind == "softplus":
        raise ValueError("A_log: got None with use_gate_in_kernel=True, expected a tensor")
    return {"gate_activation": kind, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule over whole sequences; a single step without gradients is computed as a decoding step.

    Args:
        q, k, v, beta, scale, cu_seqlens: as in :func:`tfla.delta_rule`.
        g: its log-gates.
        initial_state: (N, HV, K, V), or (N, HV, V, K) with `state_v_first`; zeros if None.
        output_final_state: also return the final states.
        state_v_first: the layout of states.
        options: further options of :func:`tfla.delta_rule`.

    Returns:
        o (B, T, HV, V), and the final states in the same layout, or None.
    """
    check_flags(
        output_final_state=output_final_state, state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=options.get("normalize_qk", False),
    )  # fmt: skip
    options = {**options, "normalize_qk": bool(options.get("normalize_qk"))}  # None is False
    if initial_state is not None:
        initial_state = key_first(initial_state, q, v, cu_seqlens, state_v_first)
    has_heads = all(isinstance(t, Tensor) and t.dim() == 4 for t in (q, v))
    if has_heads and q.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():  # a decoding step
        o, last = tfla.delta_rule_steps(q, k, v, beta, state_of_step(initial_state, q, v), g, scale=scale, **options)
    else:
        state = None if initial_state is None else tfla.State(initial_state)
        o, last = tfla.delta_rule(
            q, k, v, beta, g, scale=scale, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, **options
        )
    return o, final_state(last, output_final_state, state_v_first)


def final_state(last: tfla.State, output_final_state: bool, state_v_first: bool = False) -> Tensor | None:
    """Return the final states in the layout of the caller, or None where they are not asked for."""
    if not output_final_state:
        return None
    return last.C.transpose(-1, -2) if state_v_first else last.C
