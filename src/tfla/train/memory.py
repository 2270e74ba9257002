"""What a training run needs of memory and what the device has, before anything is allocated."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig

FLOAT32 = 4  # bytes of a weight, a gradient and each of AdamW's two moments


class Need(NamedTuple):
    """Bytes that a training step needs."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """An estimate: what the forward keeps for the backward, and the gradient of the logits."""

    @property
    def state(self) -> int:
        """All but the activations, which is known exactly."""
        return self.parameters + self.gradients + self.optimizer


class Memory(NamedTuple):
    """Bytes of a device; None where the system does not say."""

    limit: int | None
    """What this process can have at most, swap space included."""
    free: int | None
    """What is free now."""


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the numbers in a model's weights without building it: all of them, and those that learn.

    Raises:
        UserError: the model is so large that its weights cannot be numbered.
    """
    try:
        with torch.device("meta"):
            model = LanguageModel(dataclasses.replace(config, num_blocks=1))
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
        raise UserError(f"model: got {_sizes(config)}, which no computer can hold") from error
    counts = []
    for learning in (False, True):
        block, whole = (
            sum(p.numel() for p in module.parameters() if p.requires_grad or not learning)
            for module in (model.blocks[0], model)
        )
        counts.append(whole + (config.num_blocks - 1) * block)
    return counts[0], counts[1]


def needed(config: ModelConfig, tokens: int, bfloat16: bool) -> Need:
    """Compute what a step needs.

    Args:
        config: of the model.
        tokens: in one pass, context times the sequences that are computed at once.
        bfloat16: whether the model runs under autocast.
    """
    parameters, learning = count_parameters(config)
    size = 2 if bfloat16 else FLOAT32
    # Of a block: the residual stream stays in float32; projections, gates and outputs; the two halves of the SwiGLU.
    block = 4 * config.d_model * FLOAT32 + (10.5 * config.d_model + 2 * config.ffn_dim) * size
    # Logits before and after the soft cap, and the gradients of both.
    ends = 3 * config.d_model * FLOAT32 + 4 * config.vocab_size * FLOAT32
    casts = 2 * parameters if bfloat16 else 0
    activations = casts + int(tokens * (config.num_blocks * block + ends))
    return Need(FLOAT32 * parameters, FLOAT32 * learning, 2 * FLOAT32 * learning, activations)


def memory_of(device: torch.device) -> Memory:
    """Ask a device, or for the CPU the operating system, for its memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for reuse
        return Memory(free, free)
    return _of_this_machine() if device.type == "cpu" else Memory(None, None)


def check_memory(config: ModelConfig, tokens: int, bfloat16: bool, device: torch.device) -> str | None:
    """Refuse a model whose weights, gradients and optimizer states do not fit.

    Args:
        config: of the model.
        tokens: in one pass.
        bfloat16: whether the model runs under autocast.
        device: where it is trained.

    Returns:
        a warning where activations, which can only be estimated, may not fit besides; else None.

    Raises:
        UserError: what is known exactly does not fit; the message says what is needed and what there is.
    """
    need, there = needed(config, tokens, bfloat16), memory_of(device)
    parts = (
        f"parameters {size_text(need.parameters)}, gradients {size_text(need.gradients)}, "
        f"optimizer {size_text(need.optimizer)}, activations about {size_text(need.activations)}"
    )
    if there.limit is not None and need.state > there.limit:
        raise UserError(
            f"model: {_sizes(config)} does not fit on {device}: training needs {parts}, "
            f"and there are {size_text(there.limit)}"
        )
    if there.free is not None and need.state + need.activations > there.free:
        return (
            f"this may not fit on {device}, where {size_text(there.free)} are free: training needs {parts}; "
            "a larger accumulate, a smaller batch_size or a shorter context needs less for activations"
        )
    return None


def size_text(size: float) -> str:
    """Write a number of bytes for people: "1.5 GiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(size).bit_length() - 1) // 10)
    return f"{size:,.0f} bytes" if power == 0 else f"{size / 1024**power:,.1f} {units[power]}"


def _sizes(config: ModelConfig) -> str:
    return f"d_model {config.d_model}, num_blocks {config.num_blocks}, vocabulary {config.vocab_size}"


def _of_this_machine() -> Memory:
    limits: list[int] = []
    free: list[int] = []
    if sys.platform == "linux":
        with suppress(OSError, ValueError, KeyError, IndexError):
            lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
            info = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
            limits.append(info["MemTotal"] + info["SwapTotal"])
            free.append(info["MemAvailable"] + info["SwapFree"])
            for most, used in _cgroup_limits():
                limits.append(most + info["SwapTotal"])
                free.append(max(0, most - used))
        with suppress(ImportError, OSError, ValueError, IndexError):
            import resource

            most = resource.getrlimit(resource.RLIMIT_AS)[0]
            if most != resource.RLIM_INFINITY:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                limits.append(max(0, most - used))
                free.append(max(0, most - used))
    return Memory(min(limits, default=None), min(free, default=None))


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return limit and use in bytes of each control group (version 2 or 1) of this process that has a limit."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, below = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup/memory")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            group = top / below.strip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # ValueError: "max", which is no limit
                    found.append(tuple(int((folder / name).read_text()) for name in names))
                if folder == top:
                    break
    return [(most, used) for most, used in found if most < 2**60]
