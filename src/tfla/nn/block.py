"""A block of the language model: sequence mix, then feed-forward."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn.attention import Attention
from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, SequenceMixer, autocast_once, input_std, output_std, recomputed
from tfla.nn.mlstm import MLSTM

MIXERS: dict[str, type[MLSTM] | type[Attention]] = {"mlstm_exp": MLSTM, "mlstm_sig": MLSTM, "attention": Attention}


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x) (Shazeer, 2020), without biases: (..., d_model) -> the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, config.ffn_dim
        self.gate_proj = Projection(d, hidden, input_std(d))
        self.up_proj = Projection(d, hidden, input_std(d))
        self.down_proj = Projection(hidden, d, output_std(d, config.num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(recomputed(_gate_units, self.gate_proj(x), self.up_proj(x)))


def _gate_units(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise."""
    return F.silu(gate) * up


class Block(nn.Module):
    """x + MIX(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)) (appendix E.2), around the mixer that the config names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.mixer: SequenceMixer = MIXERS[config.mixer](config)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config)

    def _add(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed
        return x + self.ffn(autocast_once(self.ffn_norm(x)))

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """Arguments and results of :meth:`SequenceMixer.forward`."""
        mixed, new = self.mixer(
            autocast_once(self.mixer_norm(x)), state,
            document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state,
        )  # fmt: skip
        return self._add(x, mixed), new

    def step(self, x: Tensor, state: Any, in_place: bool = False) -> tuple[Tensor, Any]:
        """Arguments and results of :meth:`SequenceMixer.step`."""
        mixed, new = self.mixer.step(autocast_once(self.mixer_norm(x)), state, in_place)
        return self._add(x, mixed), new
