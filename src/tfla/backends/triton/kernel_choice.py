"""The cost model of kernel=None: which Triton kernel is predicted to be faster for a pair of head dims.

It counts FLOPs and bytes of one step of one head, forward and backward, against the rates of tensor cores and memory.
The choice depends on head dims alone, so that a traced call stays one graph for all lengths. The number of programs
relative to multiprocessors matters for segments (:mod:`tfla.backends.gpu.segmentation`).
"""

from __future__ import annotations

import functools

import torch

from tfla.backends.gpu import config

FLOPS_PER_BYTE = 190  # FLOPs that the tensor cores of an H200 compute while it moves a byte; 160 to 300 on other GPUs
# Shares of the tensor cores' rate that kernels reach on an H200, from fig4, fig5 and fig14 in benchmarks/results.
WGMMA_SHARE = 0.38  # fused scans with wgmma, dqk up to 128
LARGE_STATE_SHARE = 0.24  # the same with larger dqk, whose states leave few registers
WARP_MMA_SHARE = 0.09  # fused scans on Hopper with MMAs of single warps, which reach a fraction of its rate
PAPER_SHARE = 0.39  # the paper's kernels; fused scans on other GPUs than Hopper


def fused_cost(K: int, V: int, itemsize: int, kernel_config: config.KernelConfig, architecture: int) -> float:
    """Return the cost of kernel "fused" in FLOPs; every program of a head computes P and loads shared operands."""
    L = kernel_config.tile_steps
    columns, rows = config.ceil_div(V, kernel_config.o_dv.split), config.ceil_div(K, kernel_config.dq_dk.split)
    flops = 2 * (columns * 2 * L * K + 2 * L * V + 4 * K * V) + 2 * (rows * 2 * L * V + 2 * L * K + 4 * K * V)
    moved = 2 * (columns * 2 * K + 2 * V) + 2 * (rows * 2 * V + 3 * K)
    if kernel_config.wgmma_dq_dk:
        share = WGMMA_SHARE if K <= 128 else LARGE_STATE_SHARE
    else:
        share = WARP_MMA_SHARE if architecture == 90 else PAPER_SHARE
    return max(flops / share, moved * itemsize * FLOPS_PER_BYTE)


def paper_cost(K: int, V: int, itemsize: int, chunk_size: int) -> float:
    """Return the cost of kernel "tfla" in FLOPs: quadratic inside a chunk, with stored states and inputs."""
    flops = 14 * K * V + chunk_size * (4 * K + 3 * V)
    moved = 10 * (K + V) * itemsize + 6 * K * V * 4 / chunk_size
    return (flops + moved * FLOPS_PER_BYTE) / PAPER_SHARE


@functools.cache
def cheapest(K: int, V: int, itemsize: int, chunk_size: int, device: torch.device) -> str:
    """Return the kernel for head dims K and V on a GPU; `chunk_size` is that of the paper's kernels."""
    if itemsize != 2:  # the paper's kernels were not faster in any measurement
        return "fused"
    architecture = config.architecture(device)
    kernel_config = config.choose_kernel_config(K, V, itemsize, "tf32", architecture)
    fused = fused_cost(K, V, itemsize, kernel_config, architecture)
    return "fused" if fused <= paper_cost(K, V, itemsize, chunk_size) else "tfla"
