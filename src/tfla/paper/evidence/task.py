"""The interface of a task: batches to train on, and what is measured of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn import LanguageModel

IGNORED = -100  # the target of a token after which nothing is asked
TOKENS = 1 << 15  # that are read at once
KEPT_TOKENS = 1 << 19  # of sequences that are read side by side
Row = dict[str, Any]


class Batch(NamedTuple):
    """Sequences, and the token that the model has to predict after each of their tokens."""

    ids: Tensor
    """(B, T) int64 tokens."""
    targets: Tensor
    """(B, T) int64: the right answer after the token, or IGNORED."""


class Task(Protocol):
    """A task; its fields are plain numbers and texts, which are stored with the results."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def sampler(self, batch_size: int, generator: torch.Generator) -> Callable[[], Batch]:
        """Return a function that draws a training batch of fixed shape on the generator's device."""

    def measure(self, model: LanguageModel, generator: torch.Generator, sequences: int) -> list[Row]:
        """Return what a trained model does on that many fresh sequences of each kind, in rows of numbers."""


def answers(
    model: LanguageModel, ids: Tensor, last: int | None = None, tokens: int = TOKENS, kept: int = KEPT_TOKENS
) -> Tensor:
    """Return the likeliest answers after tokens, with the state carried from chunk to chunk.

    Memory is that of a chunk and of the states, whatever the length: recurrent mixers read sequences of any length.
    Attention keeps keys and values of whole sequences, so that few long sequences are read side by side.

    Args:
        model: the model.
        ids: (B, T) int64 tokens; those of a chunk at a time are moved to the model's device.
        last: the number of answers at the end that are returned; None is all.
        tokens: the number of tokens, of all sequences that are read side by side, that are read at once.
        kept: the number of tokens of the sequences that are read side by side.

    Returns:
        the answers (B, last) int64 on the device of ids.
    """
    found = [
        torch.cat([logits.argmax(-1).to(ids.device) for logits in _logits_by_chunk(model, part, tokens, last)], 1)
        for part in ids.split(max(1, kept // ids.shape[1]))
    ]
    return torch.cat(found)


def losses(model: LanguageModel, ids: Tensor, targets: Tensor, tokens: int = TOKENS, kept: int = KEPT_TOKENS) -> Tensor:
    """Return the cross-entropy (B, T) in nats of targets, read as :func:`answers` reads them, on the device of ids."""
    found, together = [], max(1, kept // ids.shape[1])
    for part, right in zip(ids.split(together), targets.split(together), strict=True):
        row, start = [], 0
        for logits in _logits_by_chunk(model, part, tokens, None):
            end = start + logits.shape[1]
            asked = right[:, start:end].to(logits.device)
            row.append(F.cross_entropy(logits.transpose(1, 2), asked, reduction="none").to(ids.device))
            start = end
        found.append(torch.cat(row, 1))
    return torch.cat(found)


def _logits_by_chunk(model: LanguageModel, ids: Tensor, tokens: int, last: int | None) -> Iterator[Tensor]:
    """Yield the logits of the last tokens, of one chunk after the other."""
    device, state, (B, T) = model.embedding.weight.device, None, ids.shape
    first, chunk = 0 if last is None else T - last, max(1, tokens // B)
    with torch.no_grad():
        for start in range(0, T, chunk):
            part = ids[:, start : start + chunk].to(device)
            hidden, state = model.hidden(part, state, return_state=True)
            if start + part.shape[1] > first:
                yield model.logits(hidden[:, max(0, first - start) :])
