"""The forward of MiniMax's Lightning Attention, on tfla's linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.fla import chunk_simple_gla
from tfla.integrations.transformers.packed import forget_at_starts


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the layer, with the log-decay -slope_rate of each head and without a scale of the queries.

    Args:
        self: the layer, a MiniMaxLightningAttention.
        hidden_states: (B, T, D).
        position_embeddings: not read; this attention has no positions.
        attention_mask: (B, T), 0 at padding, or None.
        past_key_values: the cache, which holds the states (B, H, K, K), or None.
        cu_seq_lens_q: (sequences + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        seq_idx: (B, T) int, the index of the sequence to which a step belongs; read without cu_seq_lens_q.
        kwargs: what a model passes to all of its layers.

    Returns:
        (B, T, D), and the states after the last tokens.
    """
    # (1) q, k, v (B, T, H, K), 0 at padding
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask[..., None].to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, -1)
    log_f = -self.slope_rate.flatten().expand(q.shape[:3])  # (B, T, H)
    if seq_idx is not None and cu_seq_lens_q is None:
        log_f = forget_at_starts(log_f, seq_idx)

    # (2) o (B, T, H, K) and the new states
    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    o, new = chunk_simple_gla(
        q, k, v, log_f, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=cu_seq_lens_q
    )  # fmt: skip
    assert new is not None
    new = new[-len(q) :]  # of packed sequences the last one continues
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, new)

    # (3) norm, output gate and projection
    o = self.norm(o.flatten(-2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o), new
