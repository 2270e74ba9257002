"""Needles in a haystack: values that were told once, far back in random tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tfla.nn import LanguageModel
from tfla.paper.evidence.task import IGNORED, Batch, Row, answers

DEPTHS = 4  # parts of a sequence by which answers are counted


@dataclass(frozen=True)
class Needle:
    """Random tokens with a few key-value pairs at random places, and the keys at the end, after which values are asked.

    Keys and values are tokens that the rest does not have, so that a model can tell what to keep.
    """

    needles: int
    """Pairs of a sequence."""
    keys: int
    """Tokens that are keys; as many others are values, and as many again the rest."""
    length: int
    """Tokens of a training sequence."""
    lengths: tuple[int, ...]
    """Tokens of the sequences on which models are measured."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return 3 * self.keys

    def sampler(self, batch_size: int, generator: torch.Generator) -> Callable[[], Batch]:
        """Return a function that draws a batch of sequences of the training length."""
        return lambda: self._batch(batch_size, self.length, generator)[0]

    def measure(self, model: LanguageModel, generator: torch.Generator, sequences: int) -> list[Row]:
        """Return the fraction of right answers by length, and by the part of the sequence in which the pair was."""
        rows = []
        for length in self.lengths:
            (ids, targets), depth = self._batch(sequences, length, generator)
            found = answers(model, ids, self.needles)
            right = (found == targets[:, -self.needles :]).double()
            by_depth = [right[depth == part] for part in range(DEPTHS)]
            rows.append(
                {"length": length, "accuracy": right.mean().item(),
                 "by_depth": [part.mean().item() if len(part) else None for part in by_depth]}
            )  # fmt: skip
        return rows

    def _batch(self, count: int, length: int, generator: torch.Generator) -> tuple[Batch, torch.Tensor]:
        """Return sequences, and for each question the part of the sequence that has its answer, (B, needles)."""
        device, n = generator.device, self.needles

        def ranks(size: int) -> torch.Tensor:
            return torch.rand(count, size, generator=generator, device=device).argsort(1)[:, :n]

        keys = ranks(self.keys)
        values = self.keys + torch.randint(self.keys, (count, n), generator=generator, device=device)
        ids = 2 * self.keys + torch.randint(self.keys, (count, length), generator=generator, device=device)
        places = 2 * ranks((length - n) // 2)  # of different pairs of tokens before the questions
        ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
        order = ranks(n)
        ids[:, -n:] = keys.gather(1, order)
        targets = torch.full_like(ids, IGNORED)
        targets[:, -n:] = values.gather(1, order)
        return Batch(ids, targets), places.gather(1, order) * DEPTHS // length
