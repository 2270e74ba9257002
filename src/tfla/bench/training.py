"""The benchmark of training: one step of a whole language model, as in `tfla train`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tfla.bench.baselines import sdpa
from tfla.bench.models import Mixer, random_model
from tfla.measure.operator import mlstm
from tfla.measure.problem import BOTH, Problem, Work, call_of
from tfla.measure.timing import Sampling, clock_of, measure
from tfla.train.config import Optim
from tfla.train.layout import compiled
from tfla.train.ranks import ONE_PROCESS, Ranks
from tfla.train.recipe import ClippedReading, clipped_gradients, optimizer

BRIEF = Sampling(repeats=5, warmup=3, pause=0.0, patience=0.1, sustained=0.1)


def step(
    problem: Problem,
    mixer: Mixer,
    compiler: str | None = None,
    attention: str = "CUDNN_ATTENTION",
    blocks: int = 24,
    vocab: int = 50_257,
) -> Work:
    """Return a training step: forward, loss, backward, clipping and AdamW on random tokens, one document a sequence.

    A call returns the loss of the call before, see :func:`update`. Weights are in float32, under autocast to the
    problem's dtype. Beforehand the operator alone is timed at its shapes, forward and backward back to back: that,
    times the blocks, is "operator_seconds".

    Args:
        compiler: the backend of torch.compile; None is eager mode.
        attention: torch's backend of attention.

    Raises:
        RuntimeError: the loss or the gradients of the step before are not finite.
    """
    operator = sdpa(problem, attention) if mixer == "attention" else mlstm(problem, _gate(mixer))
    row = measure(call_of(operator, BOTH), clock_of(problem.device), BRIEF)
    facts: dict[str, Any] = {key: operator.facts[key] for key in ("implementation", "details") if key in operator.facts}
    facts["operator_seconds"] = blocks * row["sustained_seconds"]
    del operator

    model = random_model(problem, mixer, blocks, vocab)
    windows = torch.randint(vocab, (problem.B, problem.T + 1), device=problem.device)
    torch.compiler.reset()  # otherwise graphs of the batch before would be compiled again with a dynamic batch size
    if compiler is not None:
        compiled(model, compiler)

    def losses(windows: Tensor) -> Tensor:
        chosen = sdpa_kernel(getattr(SDPBackend, attention)) if mixer == "attention" else nullcontext()
        with chosen, autocast(problem):
            # No document starts inside a sequence, so attention needs no mask, which its fast kernels do not support.
            return model.losses(windows[:, :-1], windows[:, 1:], recompute=False)

    return Work(update(model, losses), [windows], facts)


def autocast(problem: Problem) -> torch.autocast:
    """Return the context in which a model runs in the dtype of a problem, with weights in float32."""
    dtype = getattr(torch, problem.dtype)
    return torch.autocast(torch.device(problem.device).type, dtype, enabled=dtype != torch.float32)


def update(
    model: nn.Module,
    losses: Callable[[Tensor], Tensor],
    ranks: Ranks = ONE_PROCESS,
    passes: int = 1,
    reduce_each_pass: bool = True,
) -> Callable[[Tensor], float | None]:
    """Return the function that updates a model once: windows -> the mean loss of this process one update before.

    The loss is read one step late, as in `tfla train`; the first call has none to return.

    Args:
        model: the model.
        losses: windows -> the loss of every token.
        ranks: the processes that train the model.
        passes: the parts of the windows whose gradients are accumulated.
        reduce_each_pass: whether FSDP2 reduces gradients after each of them, or once.

    Raises:
        RuntimeError: the loss or the gradients of the step before are not finite.
    """
    recipe = Optim(lr=8e-4)  # table 4, 1.4B
    adamw = optimizer(model, recipe)
    pending: ClippedReading | None = None  # of the step that is enqueued

    def run(windows: Tensor) -> float | None:
        nonlocal pending
        parts, before = windows.chunk(passes), pending
        pending = clipped_gradients(model, losses, parts, recipe.clip, ranks, reduce_each_pass).reading()
        adamw.step()
        adamw.zero_grad()  # only weights and moments are kept between steps
        if before is None:
            return None
        loss, norm = before.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RuntimeError(f"loss {loss}, gradient norm {norm}: a step that fails is no measure of one")
        return loss

    return run


def _gate(mixer: str) -> Literal["exp", "sigmoid"]:
    """Return the input gate of a mixer."""
    return "exp" if mixer == "mlstm_exp" else "sigmoid"
