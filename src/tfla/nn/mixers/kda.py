"""Kimi Delta Attention."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tfla.nn.config import ModelConfig
from tfla.nn.layers import LowRankProjection, Projection, Sharding, input_std
from tfla.nn.mixers.decay import DecayParameters
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer, strengths


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Linear's mixer, KDA (Kimi Team, arXiv 2510.26692): the delta rule after a decay of each key channel.

    C'_t = diag(exp(f_t)) C_{t-1}, C_t = C'_t + b_t k_t (v_t - C'_t^T k_t)^T, with
    f_t = -exp(A_log) softplus(W_2 W_1 x_t + dt_bias), b_t = sigmoid(W_b x_t), and q and k of norm 1;
    y_t = W_o (RMS(scale C_t^T q_t) * sigmoid(W_4 W_3 x_t)). W_1 and W_3 have as many rows as a head of v has
    channels. q, k and v come from short convolutions with SiLU.
    """

    name = "kda"
    has_convolution = True
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "beta_proj": "columns", "decay_proj.down": "whole", "decay_proj.up": "columns", "decay": "heads",
        "gate_proj.down": "whole", "gate_proj.up": "columns", "norm": "shared",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, heads, rank = config.d_model, self.num_heads, self.head_dim
        self.beta_proj = Projection(d, heads, input_std(d))
        self.decay_proj = LowRankProjection(d, rank, heads * self.qk_head_dim)
        self.decay = DecayParameters(heads, self.qk_head_dim)
        self.gate_proj = LowRankProjection(d, rank, heads * self.head_dim)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps, "sigmoid")
        self.beta_activation = strengths(config)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        f = self.decay_proj(x).unflatten(-1, (-1, self.qk_head_dim))
        h = run.delta_rule(q, k, v, self.beta_proj(x), self.beta_activation, f, self.decay())
        return self.out_proj(self.norm(h, self.gate_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2))
