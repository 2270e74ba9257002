"""The kernel configuration of one call: tile sizes, warps and pipeline stages by head dims and GPU.

K and V are dqk and dhv, padded to powers of two. Every fused scan keeps a tile of the state C, (K, V) or its transpose,
on chip and loops over tiles of `tile_steps` steps of the sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from tfla.backends.base import Inputs
from tfla.backends.gpu.runtime import INTERPRETED, constant, planned_gpu

SHORTEST_SEGMENT = 512  # steps; shorter segments spend more on their start than they gain


@dataclass(frozen=True)
class TileConfig:
    """The tile sizes and launch options of one fused scan.

    A program holds `split` rows of the dim that is divided among programs (dhv for o and dv, dqk for dq and dk). It
    holds its part of the state as `blocks` blocks of `block` columns of dhv.
    """

    split: int  # rows or columns of the state that one program holds
    block: int  # width of a block of the state along dhv
    blocks: int  # number of such blocks, 1 or 2
    num_warps: int
    stages: int  # stages of the software pipeline of the loads


# Compared by identity: the cache of `choose_kernel_config` makes one object for each configuration.
@dataclass(frozen=True, eq=False)
class KernelConfig:
    """The configuration of the fused scans of one call, chosen by measurement on an H200, elsewhere by what fits."""

    tile_steps: int  # L, steps of a tile
    o_dv: TileConfig
    dq_dk: TileConfig
    descriptors: bool  # whether all scans but dq_dk use TMA descriptors, where strides allow them
    wgmma_dq_dk: bool  # whether dq_dk is arranged for Hopper's wgmma, and uses TMA descriptors as well
    programs_per_sm: int = 1  # programs of a scan that are resident on one multiprocessor
    dq_dk_unnormalized: TileConfig | None = None  # replaces dq_dk where no normalizer state n occupies registers

    def segment_steps(self, chunk_size: int) -> int:
        """Return the number of steps of a segment: chunk_size rounded up to whole tiles."""
        return ceil_div(chunk_size, self.tile_steps) * self.tile_steps


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 16, the smallest side of an MMA operand."""
    return max(16, 1 << (n - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up. triton.cdiv does the same but is slow outside of kernels."""
    return (a + b - 1) // b


def architecture(device: torch.device) -> int:
    """Return the compute capability of a GPU, 90 for 9.0, and 80 for devices that are not from NVIDIA."""
    planned = planned_gpu(device)
    return _architecture(device) if planned is None else planned.architecture


@functools.cache
def _architecture(device: torch.device) -> int:
    """Return `architecture` of a device that is there."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if INTERPRETED:
        return 80
    target = triton.runtime.driver.active.get_current_target()  # for compilation without a GPU
    return target.arch if target.backend == "cuda" else 80


def ampere_mmas(device: torch.device) -> dict[str, str]:
    """Return the options with which Triton compiles one kernel without wgmma on Hopper; elsewhere there are none.

    ptxas 12.8 and 12.9 leave matrix descriptors of some kernels unset, mostly of those with many products in loops;
    wgmma then reads shared memory at addresses that do not exist. The MMAs of Ampere have no descriptors. Triton's
    own passes then see an Ampere GPU, and ptxas the one that is there. Unlike Triton's DISABLE_MMA_V3, which is a
    variable of the process, an option of the launch does not touch what other threads compile.
    """
    return {"arch": "sm80"} if architecture(device) == 90 else {}


def kernel_config(x: Inputs) -> KernelConfig:
    """Return the configuration of the fused scans for these inputs."""
    dqk, dhv = int(x.q.shape[3]), int(x.v.shape[3])
    return choose_kernel_config(dqk, dhv, x.q.element_size(), products(x), architecture(x.q.device))


@functools.cache
def choose_kernel_config(dqk: int, dhv: int, itemsize: int, products: str, architecture: int) -> KernelConfig:
    """Return the configuration for these head dims; its `tile_steps` does not depend on `products`.

    Args:
        dqk: the dim of q and k of a head.
        dhv: the dim of v of a head.
        itemsize: bytes of an element of q, k and v.
        products: the precision of matrix products, as :func:`products` returns it.
        architecture: the compute capability, as :func:`architecture` returns it.
    """
    K, V = power_of_two(dqk), power_of_two(dhv)
    fits = itemsize == 2 and max(K, V) <= 256 and dqk % 8 == 0 and dhv % 8 == 0
    if fits and architecture == 90:
        return _hopper_config(K, V)
    # MMAs of one warp read operands from registers; IEEE float32 has no MMAs. Two blocks need fewer registers at once
    # than one.
    L = 32 if itemsize == 2 and K <= 256 and V <= 512 else 16
    aligned = dqk % 8 == 0 and dhv % 8 == 0  # unaligned rows need registers for their addresses
    elements = 16384 if itemsize == 2 and aligned else 8192  # of the state of a program
    # tf32 MMAs of four warps read tiles of 16 columns wrongly.
    most = 32 if products in ("tf32", "tf32x3") and itemsize == 4 else 512
    split = max(16, min(V, most, elements // K))
    blocks = 2 if itemsize == 2 and split > 64 and aligned else 1
    # The largest K of which shared memory holds two tiles.
    widest = 512 if itemsize == 2 else 256 if architecture in (80, 90) else 128
    o_dv = TileConfig(
        split=split,
        block=split // blocks,
        blocks=blocks,
        num_warps=4 if most == 32 else 8,
        stages=2 if widest >= K else 1,
    )
    blocks = 2 if (512 if architecture == 100 and itemsize == 2 else 64) < V and aligned else 1
    least = 32 if products == "ieee" and itemsize == 4 else 16  # rows, so that eight warps have work
    elements //= 2 if architecture == 120 and itemsize == 2 else 1
    split = max(16, min(K, most, max(least, elements // V)))
    few_warps = products == "ieee" and itemsize == 4 and V == 256 and aligned
    dq_dk = TileConfig(split=split, block=V // blocks, blocks=blocks, num_warps=4 if few_warps else 8, stages=1)
    return KernelConfig(
        tile_steps=L,
        o_dv=o_dv,
        dq_dk=dq_dk,
        descriptors=architecture == 90 and itemsize == 2 and K <= 256,
        wgmma_dq_dk=False,
    )


def _hopper_config(K: int, V: int) -> KernelConfig:
    """Return the configuration of 16-bit inputs on Hopper: wgmma of four warps reads operands from shared memory."""
    if K == 128 and V <= 64:  # the head dims of Mamba-2: two programs with a whole state each fit a multiprocessor
        return KernelConfig(
            tile_steps=64,
            o_dv=TileConfig(split=V, block=V, blocks=1, num_warps=4, stages=2),
            dq_dk=TileConfig(split=64, block=V, blocks=1, num_warps=4, stages=2),
            descriptors=True,
            wgmma_dq_dk=True,
            programs_per_sm=2,
            dq_dk_unnormalized=TileConfig(split=K, block=V, blocks=1, num_warps=4, stages=2),
        )
    split = min(V, 256 if K <= 128 else 64)
    blocks = 2 if split > 128 else 1
    num_warps, stages = 8 if split * K > 8192 else 4, 3 if K <= 128 else 2
    o_dv = TileConfig(split=split, block=split // blocks, blocks=blocks, num_warps=num_warps, stages=stages)
    blocks = 2 if V > 128 else 1
    dq_dk = TileConfig(split=min(K, 64), block=V // blocks, blocks=blocks, num_warps=4, stages=2)
    return KernelConfig(tile_steps=64, o_dv=o_dv, dq_dk=dq_dk, descriptors=True, wgmma_dq_dk=True)


def float32_products() -> str:
    """Return how PyTorch is set to multiply float32: "ieee" for "highest", "tf32x3" for "high", "tf32" for "medium"."""
    try:
        return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by the newer `torch.backends.cuda.matmul.fp32_precision`
        return "tf32x3" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def products(x: Inputs) -> str:
    """Return the precision of matrix products of these inputs; "tf32" for 16-bit inputs, which have only one."""
    if x.q.dtype != torch.float32:
        return "tf32"
    planned = planned_gpu(x.q.device)
    return float32_products() if planned is None else planned.float32_products


@constant
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 where kernels are interpreted."""
    planned = planned_gpu(device)
    return _processors(device) if planned is None else planned.processors


@functools.cache
def _processors(device: torch.device) -> int:
    """Return `processors` of a device that is there."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
