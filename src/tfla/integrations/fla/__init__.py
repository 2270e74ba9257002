"""The interface of flash-linear-attention's functions with one gate per head, on tfla's operator.

They all compute

    C_t = exp(g_t) C_{t-1} + k_t v_t^T        o_t = scale C_t^T q_t

from q, k (B, T, H, K), v (B, T, H, V) and states (N, H, K, V) of N sequences. Returned states are float32, or float64
where q is; outputs have the dtype of v.

The names, the argument order, the layouts and the defaults are those of flash-linear-attention 0.6. Modules have the
names that they have in that package: `fla.ops.simple_gla` becomes `tfla.integrations.fla.simple_gla`. docs/fla.md says
what differs.
"""

from __future__ import annotations

from tfla.integrations.fla.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from tfla.integrations.fla.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from tfla.integrations.fla.retention import (
    chunk_retention,
    fused_chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
)
from tfla.integrations.fla.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]
