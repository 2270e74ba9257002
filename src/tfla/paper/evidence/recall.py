"""Multi-query associative recall (Arora et al., arXiv 2312.04927): what was the value of this key?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tfla.nn import LanguageModel
from tfla.paper.evidence.task import IGNORED, Batch, Row, answers


@dataclass(frozen=True)
class Recall:
    """Sequences of key-value pairs, then of keys that are drawn from them; after each of these its value is asked.

    A sequence has one of the numbers of pairs, and distinct keys. Its state has to hold all pairs, since any of them
    can be asked for.
    """

    keys: int
    """Tokens that are keys; as many others are values."""
    pairs: tuple[int, ...]
    """Numbers of pairs, one of which a sequence has."""
    length: int
    """Tokens of a sequence, pairs and questions."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return 2 * self.keys

    def sampler(self, batch_size: int, generator: torch.Generator) -> Callable[[], Batch]:
        """Return a function that draws a batch of sequences, each with one of the numbers of pairs."""
        choices = torch.tensor(self.pairs, device=generator.device)

        def sample() -> Batch:
            chosen = torch.randint(len(choices), (batch_size,), generator=generator, device=generator.device)
            return self._batch(choices[chosen], generator)

        return sample

    def measure(self, model: LanguageModel, generator: torch.Generator, sequences: int) -> list[Row]:
        """Return the fraction of right answers by the number of pairs."""
        rows = []
        for pairs in self.pairs:
            count = torch.full((sequences,), pairs, device=generator.device)
            ids, targets = self._batch(count, generator)
            asked = targets != IGNORED
            right = (answers(model, ids) == targets)[asked]
            rows.append({"pairs": pairs, "accuracy": right.double().mean().item()})
        return rows

    def _batch(self, pairs: Tensor, generator: torch.Generator) -> Batch:
        """Return a sequence for each of the numbers of pairs (B,)."""
        device, B, most = generator.device, len(pairs), max(self.pairs)
        keys = torch.rand(B, self.keys, generator=generator, device=device).argsort(1)[:, :most]
        values = self.keys + torch.randint(self.keys, (B, most), generator=generator, device=device)
        asked = torch.rand(B, self.length, generator=generator, device=device) * pairs[:, None]
        position = torch.arange(self.length, device=device)
        given = position < 2 * pairs[:, None]  # (B, T)
        pair = torch.where(given, position // 2, asked.long())
        key, value = keys.gather(1, pair), values.gather(1, pair)
        is_value = given & (position % 2 == 1)
        return Batch(torch.where(is_value, value, key), value.masked_fill(given, IGNORED))
