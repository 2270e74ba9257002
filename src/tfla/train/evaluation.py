"""The loss of each token, and the evaluation of a model on the held-out tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tfla._util.device import send
from tfla.nn import LanguageModel
from tfla.train.data import Tokens, heldout_windows
from tfla.train.ranks import ALL_STEPS, ONE_PROCESS, Ranks, StepsPart

Reset = Literal["gate", "cu_seqlens"]


def token_losses(
    model: Callable[..., Tensor],
    windows: Tensor,
    bos: int,
    reset: Reset = "gate",
    *,
    steps: StepsPart = ALL_STEPS,
    device: torch.device | str | None = None,
    recompute_logits: bool = False,
) -> Tensor:
    """Return the cross-entropy in nats of every token but the first of each row, at the steps of this process.

    A token is predicted from the tokens before it in its document.

    Args:
        model: ids -> logits, such as a LanguageModel.
        windows: (B, T + 1) int64. Every row starts from the initial state.
        bos: the token that starts a document.
        reset: how the model learns where documents start: "gate" closes the forget gate there, "cu_seqlens" packs them
            as sequences.
        steps: this process's part of the steps of the rows. With cu_seqlens the rows are cut as one sequence.
        device: the device of the model; None is that of the windows. If the windows are on the CPU, the host does not
            wait for a GPU; with cu_seqlens, windows on a GPU cost a synchronization.
        recompute_logits: whether a LanguageModel holds the logits of a part of the tokens at a time, and computes them
            again in the backward.

    Returns:
        (B, T), with several processes one row or a part of each, in the dtype of the logits, float32 or float64.
    """
    ids, targets = windows[:, :-1], windows[:, 1:]
    device = windows.device if device is None else device
    options: dict[str, Any] = {}
    if reset == "gate":
        options["document_start"] = send(_own_part(ids, reset, steps) == bos, device)
    else:
        cu_seqlens = document_cu_seqlens(ids, bos)
        # The operator reads the offsets of sequences that processes share on the host.
        options["cu_seqlens"] = send(cu_seqlens, device) if steps.parts == 1 else cu_seqlens.cpu()
    ids, targets = send(_own_part(ids, reset, steps), device), send(_own_part(targets, reset, steps), device)
    shape = targets.shape
    if reset == "cu_seqlens":
        ids, targets = ids.reshape(1, -1), targets.reshape(1, -1)
    if isinstance(model, LanguageModel):
        return model.losses(ids, targets, recompute=recompute_logits, **options).view(shape)
    logits = model(ids, **options)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(shape)


def _own_part(x: Tensor, reset: Reset, steps: StepsPart) -> Tensor:
    """Return what a process has of x (B, T), where ``reset`` and ``steps`` are as in :func:`token_losses`."""
    if steps.parts == 1:
        return x
    return steps.of(x if reset == "gate" else x.reshape(1, -1))


def document_cu_seqlens(ids: Tensor, bos: int) -> Tensor:
    """Return cu_seqlens of the rows of a batch, laid end to end, in which rows and documents each start a sequence.

    Args:
        ids: (B, T) int64.
        bos: the token that starts a document.

    Returns:
        (num_sequences + 1,) int32, from 0 to B T.
    """
    start = ids == bos
    start[:, 0] = True
    end = torch.tensor([ids.numel()], device=ids.device)
    return torch.cat([start.flatten().nonzero()[:, 0], end]).int()


class Evaluation(NamedTuple):
    """The result of an evaluation, over all predicted tokens of the held-out windows."""

    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """The sum of the losses in bits, divided by the bytes of text that the tokens stand for. Models with different
    tokenizers can be compared by it."""
    tokens: int
    """The number of predicted tokens."""
    bytes: int
    """The number of bytes that they stand for."""


@torch.no_grad()
def evaluate(
    model: Callable[..., Tensor],
    tokens: Tokens,
    context: int,
    *,
    batch_size: int,
    max_windows: int | None = None,
    reset: Reset = "gate",
    device: torch.device | str = "cpu",
    ranks: Ranks = ONE_PROCESS,
    recompute_logits: bool = False,
) -> Evaluation:
    """Evaluate a model on the held-out windows, each from the initial state. The windows are the same every time.

    The processes of a run share the windows of a batch, and get the same result.

    Args:
        model: ids -> logits, such as a LanguageModel.
        tokens: the token streams.
        context: number of tokens that a window predicts.
        batch_size: number of windows in a batch.
        max_windows: the largest number of windows, evenly spread; None is all of the held-out part.
        reset: as in :func:`token_losses`.
        device: device of the model.
        ranks: the processes of the run.
        recompute_logits: as in :func:`token_losses`; without gradients nothing is computed again.

    Raises:
        UserError: nothing is held out.
    """
    windows = heldout_windows(tokens, context, max_windows)
    nats, count, size = 0.0, 0, 0
    shortest = getattr(getattr(model, "config", None), "conv_size", 2) - 1  # steps that a short convolution looks back
    for first in range(0, len(windows), batch_size):
        group = windows[first : first + batch_size]
        for length in sorted({w.stop - w.start for w in group}, reverse=True):  # only the last window may be shorter
            same = [w for w in group if w.stop - w.start == length]
            local, counts = _share(same, length - 1, ranks, shortest)
            rows = np.stack([tokens.heldout[w] for w in local]).astype(np.int64)
            padding = counts.shape[1] - (length - 1)
            rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=tokens.tokenizer.bos)
            losses = token_losses(
                model, torch.from_numpy(rows), tokens.tokenizer.bos, reset, steps=ranks.steps, device=device,
                recompute_logits=recompute_logits,
            )  # fmt: skip
            nats += math.fsum(losses.cpu()[_own_part(counts, reset, ranks.steps)].tolist())
            count += len(same) * (length - 1)
            size += sum(int(tokens.heldout_bytes[w][1:].sum()) for w in same)
    if ranks.size > 1:
        nats = math.fsum(part for (part,) in ranks.gather([0.0 if ranks.coordinates.get("tp") else nats]))
    return summarize(nats, count, size)


def _share(windows: list[slice], steps: int, ranks: Ranks, shortest: int) -> tuple[list[slice], Tensor]:
    """Return the windows that a process computes, and which of their steps count: bool (windows, steps).

    Every process computes as many rows and steps, since the model's communication needs all of them: rows are filled up
    with copies, steps with padding at the end, which no earlier step depends on.

    Args:
        windows: the windows of a batch.
        steps: the number of tokens that each of them predicts.
        ranks: the processes.
        shortest: the least number of steps of a span, where processes share the steps.
    """
    index, parts = ranks.rows
    size, width = -(-len(windows) // parts), ranks.steps.padded(steps, shortest)
    local = windows[index * size : (index + 1) * size]
    counts = torch.zeros(size, width, dtype=torch.bool)
    counts[: len(local), :steps] = True
    return local + windows[:1] * (size - len(local)), counts


def summarize(nats: float, tokens: int, size: int) -> Evaluation:
    """Return the evaluation for a sum of losses in nats over ``tokens`` tokens and ``size`` bytes."""
    loss = nats / tokens
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),  # exp overflows beyond
        bits_per_byte=nats / math.log(2) / max(size, 1),
        tokens=tokens,
        bytes=size,
    )
