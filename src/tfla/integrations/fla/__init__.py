"""The interface of flash-linear-attention's functions, on tfla's operators.

They compute linear attention with one gate per head or per key channel, and delta rules, from q, k (B, T, H, K), v
(B, T, H, V) and states (N, H, K, V) of N sequences. Returned states are float32, or float64 where q is; outputs have
the dtype of v.

The names, the argument order, the layouts and the defaults are those of flash-linear-attention 0.6. Modules have the
names that they have in that package: `fla.ops.simple_gla` becomes `tfla.integrations.fla.simple_gla`. docs/fla.md says
what differs. `patch` makes programs that were written for the package call these functions.
"""

from __future__ import annotations

from tfla.integrations.fla.comba import chunk_comba
from tfla.integrations.fla.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from tfla.integrations.fla.gated_delta_product import chunk_gated_delta_product
from tfla.integrations.fla.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tfla.integrations.fla.generalized_delta_rule import chunk_dplr_delta_rule
from tfla.integrations.fla.gla import chunk_gla, fused_recurrent_gla
from tfla.integrations.fla.kda import chunk_kda, fused_recurrent_kda
from tfla.integrations.fla.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from tfla.integrations.fla.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from tfla.integrations.fla.replacement import patch, restore
from tfla.integrations.fla.retention import (
    chunk_retention,
    fused_chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
)
from tfla.integrations.fla.rwkv7 import chunk_rwkv7
from tfla.integrations.fla.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
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
    "patch",
    "restore",
]
