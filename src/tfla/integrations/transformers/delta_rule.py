"""The functions by which delta-rule layers of transformers compute their recurrence, on tfla's operators.

Each stands for two functions of transformers, one for whole sequences and one for single tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tfla
from tfla.integrations.arguments import drop_unknown
from tfla.integrations.transformers.packed import forget_at_starts

Result = tuple[Tensor, Tensor | None]


@drop_unknown
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute the recurrence of Gated DeltaNet.

    Args:
        query, key: (B, T, H, K). H divides HV.
        value: (B, T, HV, V).
        g: (B, T, HV), log-decays.
        beta: (B, T, HV), write strengths.
        initial_state: (B, HV, K, V), the states before the first tokens; zeros if None. A decoding step without
            gradients overwrites them.
        output_final_state: also return the states after the last tokens.
        use_qk_l2norm_in_kernel: divide queries and keys by their norm.
        cu_seqlens: (sequences + 1,) int, for B = 1: the first token of each packed sequence and, last, T.
        seq_idx: (B, T) int, the index of the sequence to which a token belongs; read without cu_seqlens.

    Returns:
        (B, T, HV, V), and the states (B, HV, K, V) or None. Of packed sequences it is the state of the last one.
    """
    if cu_seqlens is None and seq_idx is not None:
        g = forget_at_starts(g, seq_idx)
    if query.shape[1] == 1 and initial_state is not None and cu_seqlens is None and not torch.is_grad_enabled():
        overwrite = initial_state.dtype == torch.promote_types(query.dtype, torch.float32)
        o, new = tfla.delta_rule_steps(
            query, key, value, beta, tfla.State(initial_state), g, normalize_qk=use_qk_l2norm_in_kernel,
            in_place=overwrite,
        )  # fmt: skip
        return o, new.C
    state = None if initial_state is None else tfla.State(initial_state)
    o, new = tfla.delta_rule(
        query, key, value, beta, g, initial_state=state, return_state=True, cu_seqlens=cu_seqlens,
        normalize_qk=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, new.C[-len(query) :] if output_final_state else None


@drop_unknown
def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute Kimi Delta Attention.

    Args:
        g: (B, T, H, K), log-decays of key channels.
        cu_seq_lens_q: the name that these layers have for cu_seqlens.

    The other arguments and the results are those of :func:`gated_delta_rule`.
    """
    return gated_delta_rule(
        query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seq_lens_q, seq_idx
    )
