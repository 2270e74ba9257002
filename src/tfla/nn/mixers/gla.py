"""Gated linear attention."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tfla.nn.config import ModelConfig
from tfla.nn.layers import LowRankProjection, Projection, Sharding, at_least_float32, input_std, recomputed
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer

RANK, TEMPERATURE = 16, 16.0


class GatedLinearAttention(RecurrentMixer):
    """GLA (Yang et al., arXiv 2312.06635): linear attention with a gate for each key channel.

    C_t = diag(a_t) C_{t-1} + k_t v_t^T with a_t = sigmoid(W_2 W_1 x_t + b)^(1/16), where W_1 has 16 rows;
    y_t = W_o (RMS(scale C_t^T q_t) * silu(W_g x_t)). It has no short convolution.
    """

    name = "gla"
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "decay.down": "whole", "decay.up": "columns", "gate_proj": "columns", "norm": "shared",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, heads = config.d_model, self.num_heads
        self.decay = LowRankProjection(d, RANK, heads * self.qk_head_dim, bias=True)
        self.gate_proj = Projection(d, heads * self.head_dim, input_std(d))
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        log_f = recomputed(_log_gate, self.decay(x)).unflatten(-1, (-1, self.qk_head_dim))
        h = run.linear_attention(q, k, v, log_f)
        return self.out_proj(self.norm(h, self.gate_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2))


def _log_gate(a: Tensor) -> Tensor:
    """Return log(sigmoid(a)^(1/16)) in float32 or float64."""
    return F.logsigmoid(at_least_float32(a)) / TEMPERATURE
