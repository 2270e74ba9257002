"""The sources of proposed tokens in speculative decoding: a smaller model, or the text so far."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tfla.nn import fused_step
from tfla.nn.decode import copy_into, copy_state, stepped_tensors
from tfla.nn.model import LanguageModel
from tfla.nn.sampling import Sampling, prefill
from tfla.nn.validation import check_int


@dataclass(frozen=True)
class NGram:
    """Proposals copied from the text so far: the tokens after the latest earlier occurrence of its last n tokens.

    They need no second model. They are often right in texts that repeat themselves: code, quotations, answers about a
    document.

    Args:
        n: the number of last tokens that are looked up. If these n have not occurred before, fewer are looked up.

    Raises:
        TypeError, ValueError: n is no int or below 1.
    """

    n: int = 3

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)


class Draft(Protocol):
    """A source of proposed tokens, whose two methods can be captured in a CUDA graph."""

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, Tensor | None]:
        """Propose tokens after each text.

        Args:
            text: (B, S) int64.
            length: (B,) int64, the number of tokens of each text, with which its row begins.

        Returns:
            tokens (B, K) int64, and the probabilities (B, K, vocab_size) from which they were drawn; None if they were
            not drawn at random.
        """

    def accept(self, lengths: Tensor) -> None:
        """Advance the state of each sequence after a call of `propose`.

        Args:
            lengths: (B,) int64, from 0 to K + 1: the number of tokens to advance by. The first one is the last token of
                the text, the others are accepted proposals.
        """


class Lookup:
    """The proposals of :class:`NGram`, ``count`` at a time."""

    def __init__(self, ngram: NGram, count: int) -> None:
        self.n, self.count = ngram.n, count

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, None]:
        """Run :meth:`Draft.propose`; where the last token has not occurred before, it is repeated."""
        end = torch.arange(text.shape[1], device=text.device)  # the index of the last token of every candidate match
        back = torch.arange(self.n, device=text.device)[:, None]
        before = text[:, (end - back).clamp(min=0)]  # (B, n, S)
        last = text.gather(1, (length[:, None] - 1 - back[:, 0]).clamp(min=0))  # (B, n)
        # (B, S), the number of tokens up to `end` that equal the last tokens of the text
        equal = ((before == last[..., None]) & (end >= back)).cumprod(1).sum(1)
        earlier = end < length[:, None] - 1
        # The longest match is best, and the latest one of several that are equally long.
        score = torch.where(earlier, equal * text.shape[1] + end, -1)
        best, place = score.max(1)
        place = torch.where(best >= text.shape[1], place, length - 1)
        # Proposals that would lie past the end of the text repeat the tokens after the match with this period.
        period = (length - 1 - place).clamp(min=1)
        ahead = torch.arange(self.count, device=text.device)
        source = torch.where(
            (place == length - 1)[:, None], place[:, None], place[:, None] + 1 + ahead % period[:, None]
        )
        return text.gather(1, source), None

    def accept(self, lengths: Tensor) -> None:
        """Run :meth:`Draft.accept`, which has nothing to do here: a lookup has no state but the text."""


class ModelDraft:
    """The proposals of a model, whose state is stored before and after each of them.

    Args:
        model: the model.
        ids: (B, T) int64, the prompts; a text begins with its prompt and one more token.
        count: the number of proposed tokens. There are count + 2 copies of the state, but one of attention's caches.
        sampling: how proposed tokens are drawn.
        capacity: the number of tokens for which caches of attention have room.
    """

    def __init__(self, model: LanguageModel, ids: Tensor, count: int, sampling: Sampling, capacity: int) -> None:
        self.count, self.sampling = count, sampling
        self.state = copy_state(prefill(model, ids)[1], capacity)
        fusable = fused_step.unsupported(model, self.state) is None
        self.step = fused_step.FusedStep(model, len(ids)) if fusable else functools.partial(model.step, in_place=True)
        self.stepped = stepped_tensors(self.state)
        # The tensors that steps change, after 0 to count + 1 steps, (count + 2, B, ...) each
        self.snapshots = [t.new_empty(count + 2, *t.shape) for t in self.stepped]

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run :meth:`Draft.propose`; one more step reads the last proposal, which may be accepted with all others."""
        token = text.gather(1, length[:, None] - 1)[:, 0]
        tokens, probabilities = [], []
        self._store_snapshot(0)
        for number in range(1, self.count + 2):
            logits, new = self.step(token, self.state)
            copy_into(self.state, new)
            self._store_snapshot(number)
            if number > self.count:
                break
            if self.sampling.greedy:
                token = logits.argmax(-1)
            else:
                probabilities.append(self.sampling.probabilities(logits))
                token = self.sampling.draw_from(probabilities[-1])
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(probabilities, 1) if probabilities else None

    def accept(self, lengths: Tensor) -> None:
        """Run :meth:`Draft.accept`: restore the state of each sequence after `lengths` steps."""
        row = torch.arange(len(lengths), device=lengths.device)
        torch._foreach_copy_(self.stepped, [snapshot[lengths, row] for snapshot in self.snapshots])

    def _store_snapshot(self, number: int) -> None:
        """Store a copy of the state after this number of steps."""
        torch._foreach_copy_([snapshot[number] for snapshot in self.snapshots], self.stepped)


def check_draft(draft: object, model: LanguageModel) -> None:
    """Check the argument ``draft`` of :func:`tfla.nn.generate`."""
    if isinstance(draft, NGram):
        return
    if not isinstance(draft, LanguageModel):
        raise TypeError(f"draft: got {type(draft).__name__}, expected a LanguageModel or NGram")
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"draft: got a vocabulary of {draft.config.vocab_size} tokens, expected the model's, "
            f"{model.config.vocab_size}"
        )
    device, expected = draft.embedding.weight.device, model.embedding.weight.device
    if device != expected:
        raise ValueError(f"draft: got device {device}, expected that of the model, {expected}")
