"""The tiles of the kernels of :mod:`tfla.nn.batched_step_kernels`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTileConfig:
    """The tiles of a kernel for several sequences.

    Attributes:
        rows: rows of the weight matrix that a program computes.
        columns: columns that it reads at a time, of weights of two bytes.
        stages: blocks of columns that are on their way or in use. All programs of a launch should fit on the device at
            once, with some 64 KiB of weights on their way to each multiprocessor.
        splits: parts of the columns that a program reads side by side.
        swapped: whether the weights are the first operand of a product. Then splits * rows should be 64, the rows of
            a product of Hopper's tensor cores.
        warps: warps of a program.
        overlapped: whether the launch starts before the one before it has ended, on Hopper and newer GPUs, and waits
            for that end on the device.
    """

    rows: int
    columns: int
    stages: int
    splits: int = 1
    swapped: bool = False
    warps: int = 4
    overlapped: bool = False


Tiles = dict[str, StepTileConfig]
# By kernel for up to so many sequences, chosen by these counts without measurements; "output" and "down" are the two
# launches of add_product. The first ones need at most 99 KiB of shared memory, which all GPUs have.
TILES: dict[int, Tiles] = {
    16: {
        "mixer_inputs": StepTileConfig(rows=32, columns=128, stages=5),
        "output": StepTileConfig(rows=32, columns=256, stages=5),
        "swiglu": StepTileConfig(rows=32, columns=128, stages=4),
        "down": StepTileConfig(rows=32, columns=256, stages=5),
        "logits": StepTileConfig(rows=32, columns=128, stages=5),
    },
    32: {
        "mixer_inputs": StepTileConfig(rows=32, columns=128, stages=4),
        "output": StepTileConfig(rows=32, columns=128, stages=5),
        "swiglu": StepTileConfig(rows=32, columns=64, stages=5),
        "down": StepTileConfig(rows=32, columns=128, stages=5),
        "logits": StepTileConfig(rows=32, columns=128, stages=4),
    },
    64: {
        "mixer_inputs": StepTileConfig(rows=32, columns=64, stages=4),
        "output": StepTileConfig(rows=32, columns=64, stages=6),
        "swiglu": StepTileConfig(rows=32, columns=64, stages=4),
        "down": StepTileConfig(rows=32, columns=64, stages=6),
        "logits": StepTileConfig(rows=32, columns=64, stages=4),
    },
}
# The fastest ones of a sweep on an H100, for 7B parameters (docs/tuning-log-models.md).
HOPPER_TILES: dict[int, Tiles] = {
    16: {
        "mixer_inputs": StepTileConfig(rows=64, columns=128, stages=4, swapped=True),
        "output": StepTileConfig(rows=32, columns=128, stages=8, splits=2, swapped=True),
        "swiglu": StepTileConfig(rows=32, columns=128, stages=4),
        "down": StepTileConfig(rows=64, columns=128, stages=9, swapped=True),
        "logits": StepTileConfig(rows=64, columns=128, stages=5, swapped=True),
    },
    32: {
        "mixer_inputs": StepTileConfig(rows=64, columns=128, stages=4, swapped=True),
        "output": StepTileConfig(rows=64, columns=128, stages=8, swapped=True),
        "swiglu": StepTileConfig(rows=64, columns=64, stages=5, swapped=True),
        "down": StepTileConfig(rows=64, columns=128, stages=8, swapped=True),
        "logits": StepTileConfig(rows=64, columns=128, stages=4, swapped=True),
    },
    64: {
        "mixer_inputs": StepTileConfig(rows=64, columns=128, stages=3, swapped=True),
        "output": StepTileConfig(rows=32, columns=128, stages=8),
        "swiglu": StepTileConfig(rows=64, columns=64, stages=4, swapped=True),
        "down": StepTileConfig(rows=32, columns=128, stages=8),
        "logits": StepTileConfig(rows=64, columns=64, stages=6, swapped=True),
    },
}
MAX_BATCH = max(TILES)  # sequences


def choose_tiles(batch: int, architecture: int, itemsize: int) -> tuple[int, Tiles]:
    """Return the rows of a tile of tokens for so many sequences, and the tiles of each kernel.

    Args:
        batch: the number of sequences, at most MAX_BATCH.
        architecture: the GPU's compute capability, 90 for 9.0.
        itemsize: the bytes of a weight; tensor cores of Hopper multiply weights of two bytes.
    """
    tokens = min(size for size in TILES if size >= batch)
    return tokens, (HOPPER_TILES if architecture == 90 and itemsize == 2 else TILES)[tokens]
