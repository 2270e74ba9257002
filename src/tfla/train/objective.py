"""The loss of a batch, with the memory reset where a document starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reset = Literal["gate", "cu_seqlens"]


def document_borders(ids: Tensor, bos: int) -> Tensor:
    """cu_seqlens of a batch whose rows are laid end to end: rows and documents each start a sequence.

    ids: (B, T). Returns (sequences + 1,) int32, from 0 to B T.
    """
    start = ids == bos
    start[:, 0] = True
    edge = torch.tensor([ids.numel()], device=ids.device)
    return torch.cat([start.flatten().nonzero()[:, 0], edge]).int()


def token_losses(model: Callable[..., Tensor], windows: Tensor, bos: int, reset: Reset = "gate") -> Tensor:
    """Cross-entropy in nats of every token but the first of each row, given those before it in its document.

    Args:
        model: ids -> logits, a LanguageModel.
        windows: (B, T + 1) int64; a row starts with empty memory.
        bos: the token that starts a document.
        reset: how the model is told where documents start.

    Returns:
        (B, T) in the dtype of the logits, float32 or better.
    """
    ids, targets = windows[:, :-1], windows[:, 1:]
    if reset == "gate":
        logits = model(ids, document_start=ids == bos)
    else:
        logits = model(ids.reshape(1, -1), cu_seqlens=document_borders(ids, bos))
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.unflatten(0, ids.shape)
