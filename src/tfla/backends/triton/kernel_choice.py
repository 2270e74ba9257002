"""The cost model of kernel=None: which Triton kernel is predicted to be faster for a pair of head dims.

It counts FLOPs and bytes of one step of one head, forward and backward, against the rates of tensor cores and memory.
The choice depends on head dims alone, so that a traced call stays one graph for all lengths. The number of programs
relative to multiprocessors matters for segments (:mod:`tfla.backends.gpu.segmentation`).
"""

from __future__ import annotations

import functools

import torch

from tfla.backends.gpu import config

BYTE = 190  # FLOPs that the tensor cores of an H200 compute while it moves a byte; 160 to 300 on other GPUs
# Shares of the tensor cores' rate that kernels reach on an H200, from fig4, fig5 and fig14 in benchmarks/results: fused
# scans with wgmma and dqk up to 128; the same with larger dqk, whose states leave few registers; fused scans with MMAs
# of single warps, which reach a fraction of Hopper's rate; the paper's kernels.
NARROW, WIDE, WARPS, PAPERS = 0.38, 0.24, 0.09, 0.39


def walks(K: int, V: int, itemsize: int, plan: config.KernelConfig, architecture: int) -> float:
    """Return the cost of kernel "fused" in FLOPs; every program of a head computes P and loads shared operands."""
    L = plan.tile_steps
    columns, rows = config.ceil_div(V, plan.o_dv.split), config.ceil_div(K, plan.dq_dk.split)
    flops = 2 * (columns * 2 * L * K + 2 * L * V + 4 * K * V) + 2 * (rows * 2 * L * V + 2 * L * K + 4 * K * V)
    moved = 2 * (columns * 2 * K + 2 * V) + 2 * (rows * 2 * V + 3 * K)
    if plan.wgmma_dq_dk:
        share = NARROW if K <= 128 else WIDE
    else:
        share = WARPS if architecture == 90 else PAPERS
    return max(flops / share, moved * itemsize * BYTE)


def papers(K: int, V: int, itemsize: int, chunk_size: int) -> float:
    """Return the cost of kernel "tfla" in FLOPs: quadratic inside a chunk, with stored states and inputs."""
    flops = 14 * K * V + chunk_size * (4 * K + 3 * V)
    moved = 10 * (K + V) * itemsize + 6 * K * V * 4 / chunk_size
    return (flops + moved * BYTE) / PAPERS


@functools.cache
def cheapest(K: int, V: int, itemsize: int, chunk_size: int, device: torch.device) -> str:
    """Return the kernel for head dims K and V on a GPU; `chunk_size` is that of the paper's kernels."""
    if itemsize != 2:  # the paper's kernels were not faster in any measurement
        return "fused"
    architecture = config.architecture(device)
    walk = walks(K, V, itemsize, config.choose_kernel_config(K, V, itemsize, "tf32", architecture), architecture)
    return "fused" if walk <= papers(K, V, itemsize, chunk_size) else "tfla"
