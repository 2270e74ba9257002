"""How well a model predicts the held-out part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tfla.train.batches import heldout_windows
from tfla.train.objective import Reset, token_losses
from tfla.train.tokens import Tokens


class Evaluation(NamedTuple):
    """Over all predicted tokens of the held-out windows."""

    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """All nats over the bytes of text that the tokens stand for: the same unit for every tokenizer."""
    tokens: int
    bytes: int


def summarize(nats: float, tokens: int, size: int) -> Evaluation:
    """The evaluation of a sum of losses in nats over that many tokens and bytes."""
    loss = nats / tokens
    return Evaluation(loss, math.exp(min(loss, 700.0)), nats / math.log(2) / max(size, 1), tokens, size)


@torch.no_grad()
def evaluate(
    model: Callable[..., Tensor],
    tokens: Tokens,
    context: int,
    *,
    batch_size: int,
    most: int | None = None,
    reset: Reset = "gate",
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Predict the held-out windows, each from empty memory; the same windows every time.

    Args:
        model: ids -> logits, a LanguageModel.
        context: tokens a window predicts.
        batch_size: windows at once.
        most: how many windows, evenly spread; None is all of the held-out part.

    Raises:
        UserError: nothing is held out.
    """
    windows = heldout_windows(tokens, context, most)
    nats, count, size = 0.0, 0, 0
    for first in range(0, len(windows), batch_size):
        group = windows[first : first + batch_size]
        for length in sorted({w.stop - w.start for w in group}, reverse=True):  # only the last window may be shorter
            same = [w for w in group if w.stop - w.start == length]
            rows = np.stack([tokens.heldout[w] for w in same]).astype(np.int64)
            losses = token_losses(model, torch.from_numpy(rows).to(device), tokens.tokenizer.bos, reset)
            nats += math.fsum(losses.flatten().tolist())
            count += losses.numel()
            size += sum(int(tokens.heldout_bytes[w][1:].sum()) for w in same)
    return summarize(nats, count, size)
