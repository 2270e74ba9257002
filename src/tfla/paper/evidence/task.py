"""The interface of a task: batches to train on, and what is measured of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn import LanguageModel

IGNORED = -100  # the target of a token after which nothing is asked
Row = dict[str, Any]


class Batch(NamedTuple):
    """Sequences, and what the model has to say after each of their tokens."""

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


def answers(model: LanguageModel, ids: Tensor, chunk: int, last: int | None = None) -> Tensor:
    """Return the likeliest answers after tokens, with the state carried from chunk to chunk.

    Memory is that of a chunk and of the state, whatever the length: recurrent mixers read sequences of any length.

    Args:
        model: the model.
        ids: (B, T) int64 tokens; those of a chunk at a time are moved to the model's device.
        chunk: the number of tokens that are read at once.
        last: the number of answers at the end that are returned; None is all.

    Returns:
        the answers (B, last) int64 on the device of ids.
    """
    found = [logits.argmax(-1).to(ids.device) for logits in _logits_by_chunk(model, ids, chunk, last)]
    return torch.cat(found, 1)


def losses_by_chunk(model: LanguageModel, ids: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy (B, T) in nats of targets, read as :func:`answers` reads them, on the device of ids."""
    parts = zip(_logits_by_chunk(model, ids, chunk, None), targets.split(chunk, 1), strict=True)
    found = [F.cross_entropy(x.transpose(1, 2), y.to(x.device), reduction="none").to(ids.device) for x, y in parts]
    return torch.cat(found, 1)


def _logits_by_chunk(model: LanguageModel, ids: Tensor, chunk: int, last: int | None) -> Any:
    """Yield the logits of the last tokens, of one chunk after the other."""
    device, state, T = model.embedding.weight.device, None, ids.shape[1]
    first = 0 if last is None else T - last
    with torch.no_grad():
        for start in range(0, T, chunk):
            part = ids[:, start : start + chunk].to(device)
            hidden, state = model.hidden(part, state, return_state=True)
            if start + part.shape[1] > first:
                yield model.logits(hidden[:, max(0, first - start) :])
