"""How FSDP2 gathers the weights of a training run, where its options leave that open.

A block whose gathered weights are kept from its forward to its backward is gathered once an update, not twice, for the
memory of all weights. A run on GPUs keeps them where an estimate of the memory of a step says that they fit. Two blocks
are then one message, since their weights are in memory together anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tfla.nn import ModelConfig
from tfla.train.memory import FLOAT32, Sharing, count_parameters, memory_of, needed
from tfla.train.ranks import Ranks

USED = 0.9  # the part of a GPU's memory that a step may take by the estimate; NCCL and the allocator need the rest


class Gathers(NamedTuple):
    """How the weights of a run's blocks are gathered; the fields are arguments of `parallelize`."""

    reshard_after_forward: bool
    blocks_per_gather: int


class Step(NamedTuple):
    """The properties of a training step on which its memory depends."""

    model: ModelConfig
    tokens: int
    """The tokens of one pass of a process."""
    bfloat16: bool
    """Whether the model runs under autocast to bfloat16."""
    checkpointing: bool
    """Whether blocks and logits are computed again in the backward."""
    gathered_in_bfloat16: bool
    """Whether weights are gathered in bfloat16."""
    whole_gradients: bool = False
    """Whether gradients of several passes are kept whole, and reduced once."""
    prefetch: int = 0
    """The further gathers that each gather starts."""
    loss_kernels: bool = False
    """Whether kernels compute the losses, see :func:`tfla.train.memory.uses_loss_kernels`."""


def choose(
    given: bool | None, blocks: int | None, step: Step, sizes: dict[str, int], total: float, free: float
) -> Gathers:
    """Return how weights are gathered.

    The number of blocks of a message is chosen by the memory that GPUs have, not by what is free: it may change the
    order of sums, and a run that is started again repeats its bits. Kept weights change no result.

    Args:
        given: whether weights are freed after the forward; None: as they fit.
        blocks: the blocks of a gather; None: two where weights fit and are not freed by demand.
        step: the training step.
        sizes: the sizes of the mesh's dimensions by name.
        total, free: the bytes of a GPU, and those that are free before the model is on it.
    """
    sharing = Sharing.of(sizes, step.gathered_in_bfloat16)
    need = needed(step.model, step.tokens, step.bfloat16, sharing, step.checkpointing, step.loss_kernels)
    whole = -(-count_parameters(step.model)[0] // sharing.tp)
    size = 2 if step.gathered_in_bfloat16 else FLOAT32
    bytes_needed = need.state + need.activations + size * whole + _beside_weights(step, size, whole)
    fit = bytes_needed <= USED * total
    if blocks is None:
        blocks = 2 if fit and not given else 1
    return Gathers(not (fit and bytes_needed <= USED * free) if given is None else given, blocks)


def _beside_weights(step: Step, size: int, whole: int) -> int:
    """Return the bytes that kept weights bring with them on each GPU.

    Args:
        step: the training step.
        size: the bytes of a gathered weight.
        whole: the number of weights that a process computes with.
    """
    # Two messages of two blocks are under way, and with each of them whole gradients are reduced.
    block = 2 * -(-whole // step.model.num_blocks)
    in_flight = (2 + step.prefetch) * block * size + 2 * block * FLOAT32
    return in_flight + (FLOAT32 * whole if step.whole_gradients else 0)


def chosen(given: bool | None, blocks: int | None, step: Step, ranks: Ranks) -> Gathers:
    """Return how the weights of a run are gathered, the same on every process.

    Args:
        given, blocks, step: as in :func:`choose`.
        ranks: the processes of the run. On CPUs, which share the memory of their machine, weights are freed.
    """
    total = free = 0.0
    if ranks.device.type == "cuda":
        total = float(torch.cuda.get_device_properties(ranks.device).total_memory)
        free = float(memory_of(ranks.device).free or 0)
    every = ranks.gather([total, free])
    return choose(given, blocks, step, ranks.sizes, min(row[0] for row in every), min(row[1] for row in every))
