"""A language model through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.nn import LanguageModel


def compiled(model: LanguageModel, backend: Any = "inductor") -> Callable[..., Tensor]:
    """The model's forward: ids -> logits, and what else it takes but states.

    A block is compiled once for all of them, which as one graph would take many times as long; so are the logits. The
    blocks stay compiled: also the model's own forward runs them so from here on.

    Args:
        backend: of torch.compile.
    """
    for block in model.blocks:
        block.compile(backend=backend)
    logits = torch.compile(model.logits, backend=backend)

    def forward(ids: Tensor, **documents: Any) -> Tensor:
        return logits(model.hidden(ids, **documents)[0])

    return forward
