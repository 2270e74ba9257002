"""Which tokens make up a batch: a function of the seed and the step alone, so there is no state to save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tfla.train.messages import UserError
from tfla.train.tokens import Tokens


class Batches:
    """Windows of context + 1 tokens, each token once an epoch, in an order drawn anew for every epoch.

    Args:
        tokens: the stream is tokens.train.
        context: tokens a window predicts.
        batch_size: windows in a batch.
        seed: of the order.

    Raises:
        UserError: the stream is too short for one batch; the message names where the text is from.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int) -> None:
        self.stream, self.context, self.batch_size, self.seed = tokens.train, context, batch_size, seed
        predicted = len(self.stream) - 1
        if predicted < context * batch_size:
            raise UserError(
                f"{tokens.source}: {len(self.stream)} tokens to train on, but one batch needs "
                f"{context * batch_size + 1} (context {context} x batch_size {batch_size} + 1)"
            )
        # One window fewer leaves room to shift the borders from epoch to epoch.
        self.windows = max(batch_size, predicted // context - 1)
        self.slack = predicted - self.windows * context
        self._epoch = lru_cache(2)(self._draw)

    def _draw(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        generator = np.random.default_rng((self.seed, epoch))
        return int(generator.integers(self.slack + 1)), generator.permutation(self.windows)

    def __call__(self, step: int) -> Tensor:
        """The batch of a step, counted from 0: (batch_size, context + 1) int64."""
        rows = []
        for number in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, position = divmod(number, self.windows)
            offset, order = self._epoch(epoch)
            start = offset + int(order[position]) * self.context
            rows.append(self.stream[start : start + self.context + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def heldout_windows(tokens: Tokens, context: int, most: int | None) -> list[slice]:
    """Where the held-out windows lie in tokens.heldout: each slice has the tokens it predicts and one before.

    Args:
        context: tokens a window predicts; the last window may have fewer.
        most: how many windows at most, evenly spread; None is all, which predict every token but the first, once.

    Raises:
        UserError: there are fewer than two held-out tokens.
    """
    predicted = len(tokens.heldout) - 1
    if predicted < 1:
        raise UserError(
            f"{tokens.source}: nothing is held out; give more text, or raise data.heldout, or change data.split_seed"
        )
    starts = np.arange(0, predicted, context)
    if most is not None and most < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    return [slice(int(s), min(int(s) + context, predicted) + 1) for s in starts]
