"""The functions by which delta-rule layers of transformers compute their recurrence, on tfla's operators.

Each stands for two functions of transformers, one for whole sequences and one for single tokens. The operators choose
between the two themselves.
"""

from __future__ import annotations

from torch import Tensor

from tfla.integrations.arguments import drop_unknown
from tfla.integrations.fla import chunk_gated_delta_rule, chunk_kda
from tfla.integrations.transformers.packed import forget_at_starts


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
) -> tuple[Tensor, Tensor | None]:
    """Compute Gated DeltaNet's recurrence; see :func:`~tfla.integrations.fla.chunk_gated_delta_rule`.

    Args:
        seq_idx: (batch, seqlen) int, the index of the sequence to which a step belongs; read where cu_seqlens is None.

    The other arguments and the results are those of that function.
    """
    if seq_idx is not None and cu_seqlens is None:
        g = forget_at_starts(g, seq_idx)
    o, new = chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, None if new is None else new[-len(query) :]  # of packed sequences the last one continues


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
) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi Delta Attention; see :func:`~tfla.integrations.fla.chunk_kda`.

    Args:
        cu_seq_lens_q: (sequences + 1,) int, the name that models have for that function's cu_seqlens.
        seq_idx: (batch, seqlen) int, the index of the sequence to which a step belongs; read without cu_seq_lens_q.

    The other arguments and the results are those of that function.
    """
    if seq_idx is not None and cu_seq_lens_q is None:
        g = forget_at_starts(g, seq_idx)
    o, new = chunk_kda(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seq_lens_q,
    )  # fmt: skip
    return o, None if new is None else new[-len(query) :]  # of packed sequences the last one continues
