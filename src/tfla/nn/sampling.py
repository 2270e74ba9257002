"""The reading of a prompt, and the drawing of tokens from logits, for generation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla.nn.model import LanguageModel, ModelState

# Tokens of a prompt that are processed in one call, which bounds the memory of activations.
PREFILL = 16_384
# Below the smallest normal float32, sampling becomes taking the likeliest token.
SMALLEST_TEMPERATURE = SMALLEST_PROBABILITY = torch.finfo(torch.float32).tiny


def prefill(model: LanguageModel, ids: Tensor) -> tuple[Tensor, ModelState]:
    """Return the logits (B, vocab_size) after prompts (B, T) and the state after them."""
    state = model.initial_state(len(ids))
    for part in ids.split(PREFILL, 1):
        logits, state = model.read_prompt(part, state)
    return logits, state


class Sampling(NamedTuple):
    """The options by which tokens are drawn; the fields are arguments of :func:`tfla.nn.generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is taken, without random numbers."""
        return self.temperature < SMALLEST_TEMPERATURE

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return drawn tokens (B,) int64, and whether the logits (B, vocab_size) of each row are finite, (B,) bool."""
        top, likeliest = logits.max(-1)  # NaN if any logit is NaN
        finite = top.isfinite()
        if self.greedy:
            return likeliest, finite
        p, tokens = self._ranked(logits, top[:, None])
        return tokens.gather(-1, self.draw_from(p)[:, None]).squeeze(-1), finite

    def draw_from(self, p: Tensor) -> Tensor:
        """Return indices (B,) int64 drawn with weights p (B, N).

        They are those of torch.multinomial, whose checks take as many launches again: the largest of p / x for x from
        the exponential distribution.
        """
        return (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (..., vocab_size) with which tokens are drawn, at a temperature above 0.

        Args:
            logits: (..., vocab_size). Logits that are not finite are taken for 0.
        """
        logits = logits.nan_to_num(0.0, 0.0, 0.0)
        top = logits.amax(-1, keepdim=True)
        if self.top_k is None and self.top_p is None:
            return ((logits - top) / self.temperature).softmax(-1)
        p, tokens = self._ranked(logits, top)
        return torch.zeros_like(logits).scatter_(-1, tokens[..., : p.shape[-1]], p / p.sum(-1, keepdim=True))

    def _ranked(self, logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights of the likeliest tokens, (..., k), and all tokens, (..., vocab_size), the likeliest first.

        Args:
            logits: (..., vocab_size).
            top: (..., 1), the largest of them.
        """
        # The largest logit is subtracted, so that no temperature overflows a finite logit.
        ranked, tokens = ((logits - top) / self.temperature).sort(dim=-1, descending=True, stable=True)
        p = ranked[..., : logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])].softmax(-1)
        if self.top_p is not None:
            least = max(self.top_p, SMALLEST_PROBABILITY)  # float32 rounds a smaller one to 0, which all tokens reach
            p = p * (p.cumsum(-1) - p < least)  # keep a token if those before it have not reached top_p
        return p, tokens
