"""The memory that a training run needs and that its device has, compared before anything is allocated."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig, capped_loss
from tfla.nn.config import Mixer
from tfla.nn.model import TOKENS_PER_PASS

FLOAT32 = 4  # bytes of a weight, a gradient and each of AdamW's two moments


class Need(NamedTuple):
    """The bytes that a training step needs."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """An estimate of what the forward saves for the backward, and of the gradient of the logits."""
    gathered: int = 0
    """Weights that FSDP2 has gathered, and gradients that it has not reduced yet, at the same time."""

    @property
    def state(self) -> int:
        """The bytes without the activations, which are known exactly."""
        return self.parameters + self.gradients + self.optimizer


class Sharing(NamedTuple):
    """How the processes of a run share a model."""

    parts: int = 1
    """The number of processes that hold one copy of the parameters, gradients and optimizer states together."""
    tp: int = 1
    """The number of those that compute with different weights, by tensor parallelism."""
    gathers: bool = False
    """Whether FSDP2 gathers the weights that a process computes with."""
    gathered_in_bfloat16: bool = False
    kept: bool = False
    """Whether the gathered weights of a block are kept from its forward to its backward."""

    @staticmethod
    def of(sizes: dict[str, int], gathered_in_bfloat16: bool = False, kept: bool = False) -> Sharing:
        """Return the sharing on a mesh whose dimensions have these sizes by name."""
        tp, copies = sizes.get("tp", 1), sizes.get("dp_replicate", 1)
        shards = sizes.get("dp_shard", 1) * sizes.get("cp", 1)
        return Sharing(tp * shards, tp, shards * copies > 1, gathered_in_bfloat16, kept)


WHOLE = Sharing()


class Memory(NamedTuple):
    """The bytes of a device; None where the system does not report them."""

    limit: int | None
    """The most that this process can allocate, swap space included."""
    free: int | None
    """The bytes that are free now."""


@functools.cache
def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, and of those that are trained, without allocating the model.

    Raises:
        UserError: the sizes do not fit into 64 bits.
    """
    mixers = config.mixer_counts
    layers = None if config.layers is None else tuple(mixers)
    try:
        with torch.device("meta"):
            model = LanguageModel(dataclasses.replace(config, num_blocks=len(mixers), layers=layers))
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes that do not fit into 64 bits
        raise UserError(f"model: got {_sizes(config)}, which no computer can hold") from error
    counts = []
    for trained in (False, True):
        whole, *blocks = (
            sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
            for module in (model, *model.blocks)
        )
        counts.append(whole + sum((n - 1) * block for n, block in zip(mixers.values(), blocks, strict=True)))
    return counts[0], counts[1]


def needed(
    config: ModelConfig,
    tokens: int,
    bfloat16: bool,
    sharing: Sharing = WHOLE,
    checkpointing: bool = False,
    loss_kernels: bool = False,
) -> Need:
    """Return the bytes that a training step needs on one device.

    Args:
        config: the architecture of the model.
        tokens: the tokens of one pass: context times the sequences that are computed at once.
        bfloat16: whether the model runs under autocast to bfloat16.
        sharing: how several devices share the model.
        checkpointing: whether blocks and logits are computed again in the backward.
        loss_kernels: whether the kernels of :mod:`tfla.nn.capped_loss` compute the losses.
    """
    parameters, trained = (-(-count // sharing.parts) for count in count_parameters(config))
    whole = -(-count_parameters(config)[0] // sharing.tp)  # the weights that a process computes with
    size = 2 if bfloat16 else FLOAT32
    # A block saves the residual stream in float32; projections, gates and outputs; the two inputs of the SwiGLU.
    widths = [n * _relative_width(config, mixer) for mixer, n in config.mixer_counts.items()]
    mixer = 10.5 * config.d_model * sum(widths) / config.num_blocks
    block = 4 * config.d_model * FLOAT32 + (mixer + 2 * config.ffn_dim) * size
    # Logits and their gradient, by the kernels; else logits before and after the soft cap, and the gradients of both.
    ends = 3 * config.d_model * FLOAT32
    logits = config.vocab_size * (2 * size if loss_kernels else 4 * FLOAT32)
    blocks, at_once = config.num_blocks * block, tokens
    if checkpointing:  # the inputs of all blocks, and what one block saves
        blocks, at_once = config.num_blocks * config.d_model * FLOAT32 + block, min(tokens, TOKENS_PER_PASS)
    # Autocast keeps copies of all weights that it has cast until the end of the forward, and a backward reads them.
    casts = 2 * whole if bfloat16 and not sharing.gathered_in_bfloat16 else 0
    gathered = 0
    if sharing.gathers:  # embeddings and the blocks that are held; gradients of embeddings and of one block
        embeddings = -(-2 * config.vocab_size * config.d_model // sharing.tp)
        of_block = -(-(whole - embeddings) // config.num_blocks)
        held = max(2, config.num_blocks) if sharing.kept else 2
        gathered = (2 if sharing.gathered_in_bfloat16 else FLOAT32) * (embeddings + held * of_block)
        gathered += FLOAT32 * (embeddings + of_block)
    activations = casts + int(tokens * (blocks + ends) + at_once * logits)
    return Need(
        parameters=FLOAT32 * parameters,
        gradients=FLOAT32 * trained,
        optimizer=2 * FLOAT32 * trained,
        activations=activations,
        gathered=gathered,
    )


def _relative_width(config: ModelConfig, mixer: Mixer) -> float:
    """Return the width of a mixer's keys, values and gates, divided by that of the mLSTM."""
    config = dataclasses.replace(config, mixer=mixer, layers=None)
    if config.mixer in ("mlstm_exp", "mlstm_sig", "attention"):
        return 1.0
    if config.mixer == "mamba2":
        return (2 * config.mamba_state_dim / config.d_model + 3 * config.mamba_expand) / 4
    return config.num_heads * (2 * config.qk_head_dim + 3 * config.head_dim) / (4 * config.d_model)


def uses_loss_kernels(device: torch.device, compiles: bool) -> bool:
    """Return whether a training step on a device computes its losses by kernels, with or without torch.compile."""
    return not compiles and capped_loss.runs_on(device)


def memory_of(device: torch.device) -> Memory:
    """Return the memory of a device; for the CPU the operating system reports it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch for reuse
        return Memory(free, free)
    return _memory_of_this_machine() if device.type == "cpu" else Memory(None, None)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that this process has held so far: on a GPU in tensors, else in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0


def check_memory(
    config: ModelConfig,
    tokens: int,
    bfloat16: bool,
    device: torch.device,
    sharing: Sharing = WHOLE,
    checkpointing: bool = False,
    compiles: bool = False,
) -> str | None:
    """Raise unless the parameters, gradients and optimizer states of a model fit into the memory of a device.

    Args:
        config: the architecture of the model.
        tokens: the tokens of one pass.
        bfloat16: whether the model runs under autocast to bfloat16.
        device: the device of the training.
        sharing: how several devices share the model.
        checkpointing: whether blocks and logits are computed again in the backward.
        compiles: whether torch.compile computes the losses.

    Returns:
        a warning if the activations and gathered weights, which are only estimated, may not fit as well; else None.

    Raises:
        UserError: the memory does not suffice; the message says what is needed and what there is.
    """
    need = needed(config, tokens, bfloat16, sharing, checkpointing, uses_loss_kernels(device, compiles))
    available = memory_of(device)
    text = (
        f"parameters {size_text(need.parameters)}, gradients {size_text(need.gradients)}, "
        f"optimizer {size_text(need.optimizer)}, activations about {size_text(need.activations)}"
    ) + (f", gathered weights about {size_text(need.gathered)}" if need.gathered else "")
    if available.limit is not None and need.state > available.limit:
        raise UserError(
            f"model: {_sizes(config)} does not fit on {device}: training needs {text}, "
            f"and there are {size_text(available.limit)}"
        )
    if available.free is not None and need.state + need.activations + need.gathered > available.free:
        return (
            f"this may not fit on {device}, where {size_text(available.free)} are free: training needs {text}; "
            "a larger accumulate, a smaller batch_size or a shorter context needs less for activations"
            + ("" if checkpointing else ", and activation_checkpointing far less")
        )
    return None


def size_text(size: float) -> str:
    """Return a number of bytes with its unit, such as "1.5 GiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(size).bit_length() - 1) // 10)
    return f"{size:,.0f} bytes" if power == 0 else f"{size / 1024**power:,.1f} {units[power]}"


def _sizes(config: ModelConfig) -> str:
    """Return the sizes of a model as text."""
    return f"d_model {config.d_model}, num_blocks {config.num_blocks}, vocabulary {config.vocab_size}"


def _memory_of_this_machine() -> Memory:
    """Return the main memory, within the limits of control groups and of the address space of this process."""
    limits: list[int] = []
    free: list[int] = []
    if sys.platform == "linux":
        with suppress(OSError, ValueError, KeyError, IndexError):
            lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
            info = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
            limits.append(info["MemTotal"] + info["SwapTotal"])
            free.append(info["MemAvailable"] + info["SwapFree"])
            for limit, used in _cgroup_limits():
                limits.append(limit + info["SwapTotal"])
                free.append(max(0, limit - used))
        with suppress(ImportError, OSError, ValueError, IndexError):
            import resource

            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit != resource.RLIM_INFINITY:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                limits.append(max(0, limit - used))
                free.append(max(0, limit - used))
    return Memory(min(limits, default=None), min(free, default=None))


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return the limit and the use in bytes of each control group (version 1 or 2) of this process with a limit."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup/memory")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            group = top / path.strip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # ValueError: "max", which is no limit
                    found.append(tuple(int((folder / name).read_text()) for name in names))
                if folder == top:
                    break
    return [(limit, used) for limit, used in found if limit < 2**60]  # version 1 writes 2^63 for none
