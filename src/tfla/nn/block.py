"""A block of the language model, appendix E.2 of the paper: a sequence mixer and a feed-forward network."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn import batch_invariance
from tfla.nn.config import ModelConfig
from tfla.nn.layers import Accept, Projection, SequenceMixer, cast_for_autocast, input_std, output_std, recomputed
from tfla.nn.mixer_state import StatesEvery
from tfla.nn.mixers import MIXERS
from tfla.ops.state_pool import PoolRows


class Block(nn.Module):
    """A block of appendix E.2: x + MIX(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)). The config names the mixer.

    Args:
        config: the architecture of the model.
        index: the number of the block, of which :attr:`ModelConfig.layers` gives the mixer.
    """

    def __init__(self, config: ModelConfig, index: int = 0) -> None:
        super().__init__()
        own = config.for_block(index)
        self.mixer_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.mixer: SequenceMixer = MIXERS[own.mixer](own)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
        rows: PoolRows | None = None,
    ) -> tuple[Tensor, Any]:
        """Run the block on whole sequences, as :meth:`SequenceMixer.forward`; see :attr:`SequenceMixer.reads_rows`."""
        # Mixers of users may not know of these arguments.
        given = {"states_every": states_every, "rows": rows}
        further = {name: value for name, value in given.items() if value is not None}
        mixed, new = self.mixer(
            cast_for_autocast(self.mixer_norm(x)), state,
            document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state, **further,
        )  # fmt: skip
        return self._add_residuals(x, mixed), new

    def step(self, x: Tensor, state: Any, in_place: bool = False, rows: PoolRows | None = None) -> tuple[Tensor, Any]:
        """Run the block on one token of each sequence, as :meth:`SequenceMixer.step`."""
        mixed, new = self.mixer.step(cast_for_autocast(self.mixer_norm(x)), state, in_place, *_given(rows))
        return self._add_residuals(x, mixed), new

    def steps(
        self, x: Tensor, state: Any, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, Accept]:
        """Run the block on a few proposed tokens of each sequence, as :meth:`SequenceMixer.steps`."""
        mixed, accept = self.mixer.steps(cast_for_autocast(self.mixer_norm(x)), state, in_place, *_given(rows))
        return self._add_residuals(x, mixed), accept

    def _add_residuals(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the output of the mixer to the residual stream, then that of the feed-forward network."""
        x = x + mixed
        return x + self.ffn(cast_for_autocast(self.ffn_norm(x)))


def _given(rows: PoolRows | None) -> tuple[PoolRows, ...]:
    """Return an argument that mixers of users may not know of, if there is one."""
    return () if rows is None else (rows,)


class SwiGLU(nn.Module):
    """The feed-forward network W_down (silu(W_gate x) * W_up x) (Shazeer, 2020) on x (..., d_model), without biases."""

    batch_invariant = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, config.ffn_dim
        self.gate_proj = Projection(d, hidden, input_std(d))
        self.up_proj = Projection(d, hidden, input_std(d))
        self.down_proj: nn.Linear = Projection(hidden, d, output_std(d, config.num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., d_model) for x (..., d_model)."""
        return self.down_proj(recomputed(self._silu_gate, self.gate_proj(x), self.up_proj(x)))

    def _silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, elementwise."""
        silu = batch_invariance.silu if self.batch_invariant else F.silu
        return silu(gate) * up
