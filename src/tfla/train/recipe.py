"""The paper's training recipe (appendix E.2): weight decay, clipped gradients and the learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tfla._util.errors import UserError
from tfla.train.config import Optim
from tfla.train.ranks import ONE_PROCESS, Ranks, placed_as_its_parameter
from tfla.train.reading import Reading


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates the local parts of distributed parameters, which stay what its state holds.

    DTensor's rules, parameter by parameter, take several times the host time of the update, with an idle GPU.
    """

    def _init_group(self, group: dict[str, Any], params: list[Any], grads: list[Any], *states: Any) -> Any:
        """Fill the lists of tensors of a group with local ones."""
        found = super()._init_group(group, params, grads, *states)
        grads[:] = [placed_as_its_parameter(p) for p in params]
        for tensors in (params, grads, *states):
            tensors[:] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return found


def optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the weights of linear layers and on no other parameter."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if id(p) in linear], "weight_decay": config.weight_decay},
        {"params": [p for p in learning if id(p) not in linear], "weight_decay": 0.0},
    ]
    return LocalAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class Clipped(NamedTuple):
    """The losses and the norm of the gradients of an update, on the device that computes them."""

    means: tuple[Tensor, ...]
    """The mean loss of each micro-batch of this process."""
    norm: Tensor
    """The norm of all gradients before clipping."""

    def reading(self, *more: Tensor) -> ClippedReading:
        """Start to read the mean loss, the norm and further numbers.

        The reading does not wait for what is enqueued after this call, such as the update of the weights: a host that
        enqueues that and the next step first keeps its lead over the device.
        """
        return ClippedReading(Reading([*self.means, self.norm, *more]), len(self.means))


class ClippedReading(NamedTuple):
    """The losses, the norm of the gradients and further numbers of an update, on their way to the host."""

    reading: Reading
    passes: int
    """The number of losses."""

    def arrived(self) -> bool:
        """Return whether the numbers can be read without waiting."""
        return self.reading.arrived()

    def read(self) -> tuple[float, ...]:
        """Wait for the mean loss of this process, the norm and the further numbers, and return them."""
        values = self.reading.read()
        return math.fsum(values[: self.passes]) / self.passes, *values[self.passes :]


def clipped_gradients(
    model: nn.Module,
    losses: Callable[[Tensor], Tensor],
    micro_batches: Sequence[Tensor],
    clip: float,
    ranks: Ranks = ONE_PROCESS,
    reduce_each_pass: bool = True,
) -> Clipped:
    """Set the gradients of the parameters to those of a batch's mean loss, clipped to a norm of ``clip``.

    Args:
        model: the model; its earlier gradients are discarded.
        losses: windows -> the loss of every token.
        micro_batches: the batch in parts of equal size, whose gradients are accumulated.
        clip: the largest norm of all gradients together, over all processes.
        ranks: the processes; each computes the losses of its own part of the batch.
        reduce_each_pass: whether FSDP2 reduces gradients after the backward of each part, or after the last one alone.

    Returns:
        the losses of this process, and the norm before clipping.
    """
    model.zero_grad()
    means, fsdp = [], cast(Any, model)
    for number, windows in enumerate(micro_batches, 1):
        if not reduce_each_pass and hasattr(fsdp, "set_requires_gradient_sync"):
            fsdp.set_requires_gradient_sync(number == len(micro_batches))
        mean = losses(windows).mean()
        (mean / len(micro_batches)).backward()
        means.append(mean.detach())
    return Clipped(tuple(means), ranks.clip_gradients(model.parameters(), clip))


class Schedule:
    """The learning rates of a run: linear warm-up to the peak, cosine to a fraction of it, linear cooldown to 0.

    Args:
        config: the peak and the lengths.
        steps: the number of steps of the run.

    Raises:
        UserError: warm-up and cooldown do not fit into the run.
    """

    def __init__(self, config: Optim, steps: int) -> None:
        self.peak, self.final, self.steps = config.lr, config.lr * config.final_fraction, steps
        self.warmup = min(750, steps // 10) if config.warmup_steps is None else config.warmup_steps
        self.cooldown = min(1000, steps // 10) if config.cooldown_steps is None else config.cooldown_steps
        if min(self.warmup, self.cooldown) < 0 or self.warmup + self.cooldown > steps:
            raise UserError(
                f"optim.warmup_steps, optim.cooldown_steps: got {self.warmup} and {self.cooldown}, expected at least 0 "
                f"and together at most the steps of the run, {steps}"
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; it would reach 0 at the step after the last one."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        left = self.steps - step
        if left <= self.cooldown:
            return self.final * left / self.cooldown
        done = (step - self.warmup) / (self.steps - self.cooldown - self.warmup)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2
