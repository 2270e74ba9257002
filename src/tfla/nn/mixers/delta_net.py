"""DeltaNet."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, Sharding, input_std
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer, strengths


class DeltaNet(RecurrentMixer):
    """DeltaNet's mixer (Yang et al., arXiv 2406.06484): the delta rule without decay.

    C_t = C_{t-1} + b_t k_t (v_t - C_{t-1}^T k_t)^T with b_t = sigmoid(W_b x_t), and q and k of norm 1;
    y_t = W_o RMS(scale C_t^T q_t). q, k and v come from short convolutions with SiLU. It has no output gate.
    """

    name = "delta_net"
    has_convolution = True
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "beta_proj": "columns", "norm": "shared",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.beta_proj = Projection(config.d_model, self.num_heads, input_std(config.d_model))
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps)
        self.beta_activation = strengths(config)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        h = run.delta_rule(q, k, v, self.beta_proj(x), self.beta_activation)
        return self.out_proj(self.norm(h).flatten(-2))
