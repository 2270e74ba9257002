"""The sources of proposed tokens in speculative decoding: a smaller model, or the text so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tfla.nn.model import LanguageModel
from tfla.nn.proposed import ProposedSteps
from tfla.nn.sampling import Sampling, prefill
from tfla.nn.validation import check_int


@dataclass(frozen=True)
class NGram:
    """Proposals copied from the text so far: what followed the last place where its latest tokens occurred before.

    They need no second model, and are often right where texts repeat themselves: code, quotations, answers about a
    document.

    Args:
        n: how many of the latest tokens are looked up. Where these n have not occurred before, fewer are looked up.

    Raises:
        TypeError, ValueError: n is no int or below 1.
    """

    n: int = 3

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)


class Draft(Protocol):
    """A source of proposed tokens."""

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, Tensor | None]:
        """Propose tokens after each text.

        Args:
            text: (B, S) int64.
            length: (B,) int64, how many tokens of each row are text.

        Returns:
            tokens (B, K) int64, and the probabilities (B, K, vocab_size) with which they were drawn; None where the
            proposals are not random.
        """

    def accept(self, steps: Tensor, lengths: Tensor) -> None:
        """Advance by the first lengths (B,) of the tokens (B, K + 1): the last one of the text, and the proposals."""


class Lookup:
    """The proposals of :class:`NGram`, ``count`` at a time."""

    def __init__(self, ngram: NGram, count: int) -> None:
        self.n, self.count = ngram.n, count

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, None]:
        """Run :meth:`Draft.propose`; where the last token has not occurred before, it is repeated."""
        end = torch.arange(text.shape[1], device=text.device)  # the index of the last token of every candidate place
        equal = torch.zeros_like(text)  # how many tokens up to `end` equal the latest tokens of the text
        so_far = torch.ones_like(text, dtype=torch.bool)
        for back in range(self.n):
            last = text.gather(1, (length[:, None] - 1 - back).clamp(min=0))
            before = text[:, (end - back).clamp(min=0)]
            so_far = so_far & (before == last) & (end >= back)
            equal += so_far
        earlier = end < length[:, None] - 1
        # The longest match is taken, and the last one of several that are equally long.
        score = torch.where(earlier, equal * text.shape[1] + end, -1)
        best, place = score.max(1)
        place = torch.where(best >= text.shape[1], place, length - 1)
        # Proposals that would lie past the end of the text repeat those from the place on, with this period.
        period = (length - 1 - place).clamp(min=1)
        ahead = torch.arange(self.count, device=text.device)
        source = torch.where(
            (place == length - 1)[:, None], place[:, None], place[:, None] + 1 + ahead % period[:, None]
        )
        return text.gather(1, source), None

    def accept(self, steps: Tensor, lengths: Tensor) -> None:
        """Run :meth:`Draft.accept`, which has nothing to do here: a lookup has no state but the text."""


class ModelDraft:
    """The proposals of a model, which steps through them one by one and reads the accepted ones in one call.

    Args:
        model: the model.
        ids: (B, T) int64, the prompts; the text has one token more.
        count: the number of proposed tokens.
        sampling: how they are drawn.
        capacity: the number of tokens for which caches of attention have room.
        cuda_graph: as in :func:`tfla.nn.generate`.
    """

    def __init__(
        self, model: LanguageModel, ids: Tensor, count: int, sampling: Sampling, capacity: int, cuda_graph: bool | None
    ) -> None:
        self.model, self.count, self.sampling = model, count, sampling
        _, state = prefill(model, ids)
        self.steps = ProposedSteps(model, state, count + 1, capacity=capacity, cuda_graph=cuda_graph)

    def propose(self, text: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Run :meth:`Draft.propose`."""
        token, state = text.gather(1, length[:, None] - 1)[:, 0], self.steps.state
        tokens, probabilities = [], []
        for _ in range(self.count):
            logits, state = self.model.step(token, state)
            p = self.sampling.probabilities(torch.where(logits.isfinite(), logits, 0.0))
            token = self.sampling.draw_from(p)
            tokens.append(token)
            probabilities.append(p)
        return torch.stack(tokens, 1), torch.stack(probabilities, 1)

    def accept(self, steps: Tensor, lengths: Tensor) -> None:
        """Run :meth:`Draft.accept`."""
        self.steps.verify(steps)
        self.steps.accept(lengths)


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
