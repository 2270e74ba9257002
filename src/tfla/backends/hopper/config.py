"""The choices of a call of the Hopper kernels by head dims: configuration, segments, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

from tfla.backends.base import Inputs, Spec
from tfla.backends.gpu import segmentation
from tfla.backends.gpu.checkpoints import checkpoint_interval
from tfla.backends.gpu.config import KernelConfig, choose_kernel_config, products
from tfla.backends.gpu.context import LaunchContext, fused_context
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.hopper.head_dims import SMALL_HEADS, padded_dims_of
from tfla.backends.hopper.host import STATE_ROWS, num_splits


@functools.cache
def _small_head_config(K: int, V: int, itemsize: int, multiplied: str, heads: int) -> KernelConfig:
    """Return the configuration of small heads: for the cost model a program of `heads` heads is that many programs."""
    return dataclasses.replace(choose_kernel_config(K, V, itemsize, multiplied, 90), programs_per_sm=heads)


def kernel_config(x: Inputs) -> KernelConfig:
    """Return the configuration of the Triton kernels beside the scans: tiles of 64 steps for all head dims.

    A program of small heads has two of them where their number is even.
    """
    K, V = padded_dims_of(x)
    if (K, V) in SMALL_HEADS:
        return _small_head_config(K, V, x.q.element_size(), products(x), 2 - int(x.v.shape[2]) % 2)
    return choose_kernel_config(STATE_ROWS, STATE_ROWS, x.q.element_size(), products(x), 90)


def programs_per_segment(x: Inputs) -> int:
    """Return how many programs share a segment of one head."""
    K, V = padded_dims_of(x)
    if (K, V) in SMALL_HEADS:
        return 1
    programs = K // STATE_ROWS * num_splits(V)
    return programs if K <= STATE_ROWS else max(programs, V // STATE_ROWS * num_splits(K))


def best_chunk_size(x: Inputs) -> int:
    """Return the chunk size of the smallest predicted time."""
    return segmentation.best_chunk_size(x, kernel_config(x), programs_per_segment(x))


def checkpoint_steps(x: Inputs) -> int:
    """Return the number of steps between checkpoints."""
    K, V = padded_dims_of(x)
    return checkpoint_interval(int(x.q.shape[3]), int(x.v.shape[3]), x.q.element_size(), kept=K * V)


def details(x: Inputs, chunk_size: int) -> dict[str, object]:
    """Return what :func:`tfla.explain` shows."""
    config, dims = kernel_config(x), padded_dims_of(x)
    found: dict[str, object] = {
        "tile": config.tile_steps, "segment": min(config.segment_steps(chunk_size), x.v.shape[1])
    }  # fmt: skip
    if dims != (x.q.shape[3], x.v.shape[3]):
        found["filled up to"] = f"{dims[0]} x {dims[1]}"
    return found


def signature(x: Inputs, spec: Spec) -> tuple[Hashable, ...]:
    """Return the choices that shapes, dtypes and options do not determine."""
    return (checkpoint_steps(x),)


def context(recorder: LaunchRecorder, x: Inputs, spec: Spec) -> LaunchContext:
    """Return the context of a call."""
    return fused_context(
        recorder, x, spec, config=kernel_config(x), dims=padded_dims_of(x), checkpoint_steps=checkpoint_steps(x),
        best_chunk_size=best_chunk_size,
    )  # fmt: skip
