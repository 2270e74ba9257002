"""Mamba-2."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn import batch_invariance
from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, Sharding, at_least_float32, input_std, local
from tfla.nn.mixers.decay import DecayParameters
from tfla.nn.mixers.fused_norm import Skip
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer

SMALLEST_STEP = 1e-30  # whose logarithm is finite, with a gradient of 0


class Mamba2(RecurrentMixer):
    """Mamba-2's mixer (Dao and Gu, arXiv 2405.21060) with one group of B and C for all heads.

    C_t = exp(-exp(A_log) dt_t) C_{t-1} + dt_t k_t v_t^T with dt_t = softplus(W_dt x_t + dt_bias);
    y_t = W_o RMS((C_t^T q_t + D v_t) * silu(W_z x_t)). q, k and v are C, B and x of the paper, from a short
    convolution with bias. The norm is over all heads together.
    """

    name = "mamba2"
    has_convolution = True
    convolution_bias = True
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "q_proj": "repeated", "k_proj": "repeated", "q_conv": "shared", "k_conv": "shared", "gate_proj": "columns",
        "dt_proj": "columns", "decay": "heads", "norm": "heads",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        heads = config.mamba_expand * config.d_model // config.mamba_head_dim
        super().__init__(config, heads, num_qk_heads=1)
        d, width = config.d_model, heads * self.head_dim
        self.gate_proj = Projection(d, width, input_std(d))
        self.dt_proj = Projection(d, heads, input_std(d))
        self.decay = DecayParameters(heads)
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(width, config.head_norm_eps, gate_first=True)

    def reset_parameters(self) -> None:
        """Set the skip connections to 1; the other parameters belong to modules of their own."""
        nn.init.ones_(self.D)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        A_log, dt_bias = map(at_least_float32, self.decay())
        softplus = batch_invariance.softplus if self.batch_invariant else F.softplus
        dt = softplus(at_least_float32(self.dt_proj(x)) + dt_bias)
        h = run.linear_attention(q, k, v, -A_log.exp() * dt, dt.clamp(min=SMALLEST_STEP).log(), scale=1.0)
        heads = slice(self.first_head, self.first_head + v.shape[-2])  # of this process, under tensor parallelism
        skip = Skip(v.flatten(-2), local(self.D)[heads])
        return self.out_proj(self.norm(h.flatten(-2), self.gate_proj(x), skip))
