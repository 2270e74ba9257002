"""How the fused kernels of one call are configured: tile sizes, warps and stages by head dims and GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from tfla.backends.base import Inputs
from tfla.backends.gpu.runtime import INTERPRETED

SHORTEST_SEGMENT = 512


@dataclass(frozen=True)
class Tiles:
    """Sizes of one walk, whose state is split x width, as blocks of columns."""

    split: int  # of the dim that programs share out, what one has
    block: int
    blocks: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)  # `plan_of` has one of each, which are told apart in no time
class Plan:
    """How the walks of one call run. Chosen by measurement on an H200, elsewhere by what fits."""

    L: int  # steps of a tile
    columns: Tiles
    rows: Tiles
    descriptors: bool  # tiles of other walks than rows go by tensor descriptors, where strides allow it
    lean: bool  # rows as Hopper's MMAs like them, their tiles by descriptors, too
    together: int = 1  # programs of a walk that a multiprocessor takes at once
    plain_rows: Tiles | None = None  # instead of rows where no normaliser takes registers


def power_of_two(n: int) -> int:
    """The least of at least n, and of what an MMA takes."""
    return max(16, 1 << (n - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """As triton.cdiv, which is slow outside of kernels."""
    return (a + b - 1) // b


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability of a GPU, like 90; that of an Ampere GPU for what is none of NVIDIA's."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if INTERPRETED:
        return 80
    target = triton.runtime.driver.active.get_current_target()  # what is only compiled for
    return target.arch if target.backend == "cuda" else 80


def plan(x: Inputs) -> Plan:
    return plan_of(int(x.q.shape[3]), int(x.v.shape[3]), x.q.element_size(), products(x), architecture(x.q.device))


@functools.cache
def plan_of(dqk: int, dhv: int, itemsize: int, products: str, architecture: int) -> Plan:
    """L does not depend on `products`."""
    K, V = power_of_two(dqk), power_of_two(dhv)
    fits = itemsize == 2 and max(K, V) <= 256 and dqk % 8 == 0 and dhv % 8 == 0
    if fits and architecture == 90:  # MMAs of four warps, operands in shared memory
        if K == 128 and V <= 64:  # the heads of Mamba-2: a multiprocessor holds two whole states
            return Plan(64, Tiles(V, V, 1, 4, 2), Tiles(64, V, 1, 4, 2), True, True, 2, Tiles(K, V, 1, 4, 2))
        split = min(V, 256 if K <= 128 else 64)
        blocks = 2 if split > 128 else 1
        columns = Tiles(split, split // blocks, blocks, 8 if split * K > 8192 else 4, 3 if K <= 128 else 2)
        blocks = 2 if V > 128 else 1
        rows = Tiles(min(K, 64), V // blocks, blocks, 4, 2)
        return Plan(64, columns, rows, True, True)
    # MMAs of one warp, operands in registers; IEEE float32 has none. Two blocks need fewer registers at once than one.
    L = 32 if itemsize == 2 and K <= 256 and V <= 512 else 16
    aligned = dqk % 8 == 0 and dhv % 8 == 0  # other rows take registers for their addresses
    elements = 16384 if itemsize == 2 and aligned else 8192  # of a program's state
    most = 32 if products in ("tf32", "tf32x3") and itemsize == 4 else 512  # MMAs of four warps misread 16 columns
    split = max(16, min(V, most, elements // K))
    blocks = 2 if itemsize == 2 and split > 64 and aligned else 1
    # Keys of which shared memory holds two tiles.
    widest = 512 if itemsize == 2 else 256 if architecture in (80, 90) else 128
    stages = 2 if widest >= K else 1
    columns = Tiles(split, split // blocks, blocks, 4 if most == 32 else 8, stages)
    blocks = 2 if (512 if architecture == 100 and itemsize == 2 else 64) < V and aligned else 1
    least = 32 if products == "ieee" and itemsize == 4 else 16  # keys, for threads of eight warps to share
    elements //= 2 if architecture == 120 and itemsize == 2 else 1
    split = max(16, min(K, most, max(least, elements // V)))
    few = products == "ieee" and itemsize == 4 and V == 256 and aligned  # 4.2 instead of 5.6 ms, dqk 128 on an H200
    rows = Tiles(split, V // blocks, blocks, 4 if few else 8, 1)
    return Plan(L, columns, rows, architecture == 90 and itemsize == 2 and K <= 256, False)


def float32_products() -> str:
    """How float32 is multiplied, as PyTorch is set: "highest" is "ieee", "high" "tf32x3", "medium" "tf32"."""
    try:
        return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by `torch.backends.cuda.matmul.fp32_precision`, which is then the one to read
        return "tf32x3" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def products(x: Inputs) -> str:
    """How these inputs are multiplied; bfloat16 and float16 in one way, whatever it is called."""
    return float32_products() if x.q.dtype == torch.float32 else "tf32"


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one where it is simulated."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
