"""Multi-scale retention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, Sharding, input_std
from tfla.nn.mixers.norms import GatedNorm
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.recurrent import RecurrentMixer
from tfla.nn.mixers.rotary import rotate_both


class Retention(RecurrentMixer):
    """RetNet's mixer (Sun et al., arXiv 2307.08621): a constant decay for each head, and rotated queries and keys.

    C_t = (1 - 2^(-5-h)) C_{t-1} + k_t v_t^T for head h; y_t = W_o (RMS(scale C_t^T q_t) * silu(W_g x_t)). The rotation
    is the rotary embedding, which is the phase of the paper's xPos; its magnitude is the decay. There is no short
    convolution.
    """

    name = "retnet"
    has_position = True
    tensor_parallel: ClassVar[dict[str, Sharding]] = RecurrentMixer.tensor_parallel | {
        "gate_proj": "columns", "norm": "shared",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.gate_proj = Projection(d, self.num_heads * self.head_dim, input_std(d))
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps)

    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self._queries_keys_values(x, run)
        q, k = rotate_both(q, k, run.position())
        dtype = torch.promote_types(v.dtype, torch.float32)
        head = torch.arange(v.shape[-2], device=v.device, dtype=dtype) + self.first_head
        log_f = torch.log1p(-torch.exp2(-5 - head)).expand(v.shape[:-1])
        h = run.linear_attention(q, k, v, log_f)
        return self.out_proj(self.norm(h, self.gate_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2))
