"""Gated DeltaNet."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, Sharding, input_std
from tfla.nn.mixers.decay import DecayParameters
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer, strengths


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet's mixer (Yang et al., arXiv 2412.06464): the delta rule after a decay of the whole state.

    C'_t = exp(f_t) C_{t-1}, C_t = C'_t + b_t k_t (v_t - C'_t^T k_t)^T, with
    f_t = -exp(A_log) softplus(W_a x_t + dt_bias), b_t = sigmoid(W_b x_t), and q and k of norm 1;
    y_t = W_o (RMS(scale C_t^T q_t) * silu(W_g x_t)). q, k and v come from short convolutions with SiLU.
    """

    name = "gated_delta_net"
    has_convolution = True
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "beta_proj": "columns", "decay_proj": "columns", "decay": "heads", "gate_proj": "columns", "norm": "shared",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, heads, std = config.d_model, self.num_heads, input_std(config.d_model)
        self.beta_proj = Projection(d, heads, std)
        self.decay_proj = Projection(d, heads, std)
        self.decay = DecayParameters(heads, rates=(0.0, 16.0))
        self.gate_proj = Projection(d, heads * self.head_dim, std)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps)
        self.beta_activation = strengths(config)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        h = run.delta_rule(q, k, v, self.beta_proj(x), self.beta_activation, self.decay_proj(x), self.decay())
        return self.out_proj(self.norm(h, self.gate_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2))
