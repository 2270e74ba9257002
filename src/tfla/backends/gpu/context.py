"""The context that all launches of one forward or backward share: sizes, options, and the recorder of the launches.

A launcher is a function beside its kernel that takes a :class:`LaunchContext` and operands. Which kernels a call
launches, and in which order, is written in the functions `forward` and `backward` of each
:class:`~tfla.backends.gpu.family.KernelFamily`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from tfla.backends.base import Exchange, FinalRows, Inputs, Spec
from tfla.backends.gpu.config import KernelConfig, ceil_div, products
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE

Pair = tuple[Tensor | None, Tensor | None]  # C and n, or their cotangents dC and dn


def time_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, time and head of x, (B, T, H, ...).

    The batch stride is 0 for B = 1: it could otherwise exceed 32 bits and require another kernel.
    """
    b, t, h, *_ = x.stride()
    return b if x.shape[0] > 1 else 0, t, h


def count_segments(x: Inputs, steps: int) -> int:
    """Return the number of segments of `steps` steps of all sequences, an upper bound for packed sequences.

    Packed sequence s starts with segment number cu_seqlens[s] // steps + s, so that some numbers have no steps.
    """
    B, T = x.v.shape[:2]
    return T // steps + x.sequences if x.cu_seqlens is not None else B * ceil_div(T, steps)


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """The sizes and options of one forward or backward, and the recorder that all its launches go through."""

    recorder: LaunchRecorder
    x: Inputs  # of the call; with offsets as the caller gave them
    spec: Spec  # the options of the call
    config: KernelConfig  # the tiles, warps and stages of the Triton kernels
    K: int  # dqk of the states, padded where the kernels need it
    V: int  # dhv of the states, padded
    L: int  # steps of a tile
    segment_steps: int  # steps of a segment, whole tiles
    segments: int  # segments of all sequences, or sequences where these are not cut
    checkpoint_steps: int  # steps between state checkpoints
    cu_seqlens: Tensor  # offsets of packed sequences, bounded by `sequences.bound`; any tensor where there are none
    schedule: Tensor  # work tiles of packed sequences in their order, on Hopper; any tensor where there is none
    rows: Tensor | None = None  # (N,) int: the states of packed sequences are these rows of a pool; -1: none
    # With rows, the pool that gets the final states and its rows (N,), where these are others than the initial ones.
    final_rows: FinalRows | None = None
    # With context parallelism, see `exchanging`:
    exchange: Exchange | None = None  # of states with other processes
    exchanged: list[Tensor] = field(default_factory=list)  # the results of the exchange in a forward
    # What the exchange reads in a backward: the max states after this process's steps and the decays, which the forward
    # has saved, and of the final states the max states and the cotangents dC and dn.
    saved: tuple[Tensor, ...] = ()

    @property
    def B(self) -> int:
        """The batch size of v; 1 for packed sequences."""
        return int(self.x.v.shape[0])

    @property
    def T(self) -> int:
        """The number of steps of v."""
        return int(self.x.v.shape[1])

    @property
    def H(self) -> int:
        """The number of heads of v."""
        return int(self.x.v.shape[2])

    @property
    def group(self) -> int:
        """The number of heads that share q and k."""
        return self.H // int(self.x.q.shape[2])

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""
        return self.x.cu_seqlens is not None

    @property
    def segmented(self) -> bool:
        """True if sequences are cut into segments."""
        return self.segment_steps < self.T

    @property
    def indexed(self) -> bool:
        """True if scans read and store C as rows of a pool. Of sequences cut into segments, state passing does it."""
        return self.rows is not None and not self.segmented

    @property
    def pool_dims(self) -> tuple[int, int]:
        """The dqk and dhv of states in a pool, which has no padding."""
        return int(self.x.q.shape[3]), int(self.x.v.shape[3])

    @property
    def state_dims(self) -> tuple[int, int]:
        """The dqk and dhv of the initial and final states of scans in memory: those of a pool, or K and V."""
        return self.pool_dims if self.indexed else (self.K, self.V)

    @property
    def final_pool(self) -> Tensor | None:
        """The pool that gets the final C, with rows."""
        return self.x.C if self.final_rows is None else self.final_rows.C

    @property
    def tiles(self) -> int:
        """The number of tiles of one head of all sequences."""
        return count_segments(self.x, self.L)

    @property
    def padded(self) -> bool:
        """True if the states have other head dims than the inputs."""
        return self.pool_dims != (self.K, self.V)

    @property
    def stores_segment_states(self) -> bool:
        """True if a forward that saves stores the states at segment starts, else the backward computes them again."""
        return self.spec.chunk_size < DEFERRED_CHUNK_SIZE and not self.padded

    @property
    def exact(self) -> bool:
        """True if exponents are sums of two float32 numbers, for float32 inputs."""
        return self.x.q.dtype == torch.float32

    @property
    def precision(self) -> str:
        """The precision of matrix products."""
        return products(self.x)

    @property
    def gate_inputs(self) -> tuple[Tensor, Tensor]:
        """The input and the forget gate as given, (B, T, H); without an input gate the forget gate twice."""
        return self.x.log_f if self.x.log_i is None else self.x.log_i, self.x.log_f

    @property
    def gate_strides(self) -> tuple[int, ...]:
        """The strides of both gates."""
        i, f = self.gate_inputs
        return *time_strides(i), *time_strides(f)

    @property
    def gate_forms(self) -> dict[str, bool]:
        """The constants of kernels that read the gates as given."""
        return {
            "INPUT_GATE": self.x.log_i is not None,
            "SIGMOID_I": self.spec.gates == "sigmoid",
            "SIGMOID_F": self.spec.gates != "log",
        }

    @property
    def scales(self) -> tuple[float, float]:
        """The scale and the logarithm of its absolute value in base 2."""
        scale = self.spec.scale
        return scale, math.log2(abs(scale)) if scale else -1e9

    def heads_per_program(self, most: int) -> int:
        """Return how many adjacent heads a program of a gate kernel computes, at most `most`."""
        return min(most, triton.next_power_of_2(self.H))

    def count(self, steps: int) -> int:
        """Return the number of segments of `steps` steps, see :func:`count_segments`."""
        return count_segments(self.x, steps)

    # The recorder's methods themselves, so that a launcher hands its operands to the recorder directly.

    @property
    def new(self) -> Callable[..., Tensor]:
        """The allocation of a tensor, :meth:`.LaunchRecorder.new`."""
        return self.recorder.new

    @property
    def placeholder(self) -> Callable[..., Tensor]:
        """The making of a tensor without elements, :meth:`.LaunchRecorder.placeholder`."""
        return self.recorder.placeholder

    @property
    def resize(self) -> Callable[..., Tensor]:
        """The padding or cutting of a tensor to a shape, :meth:`.LaunchRecorder.resize`."""
        return self.recorder.resize

    @property
    def do(self) -> Callable[..., Any]:
        """The recording of any function, :meth:`.LaunchRecorder.do`."""
        return self.recorder.do

    @property
    def launch(self) -> Callable[..., None]:
        """The launch of a kernel, :meth:`.LaunchRecorder.launch`."""
        return self.recorder.launch

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a tensor of zeros."""
        return self.recorder.do(Tensor.zero_, self.recorder.new(*shape, dtype=dtype))


def new_context(
    recorder: LaunchRecorder, x: Inputs, spec: Spec, *, config: KernelConfig, dims: tuple[int, int], L: int,
    segment_steps: int, segments: int, checkpoint_steps: int,
) -> LaunchContext:  # fmt: skip
    """Return the context of a call whose offsets are not bounded yet (`sequences.bound` does that).

    Args:
        recorder: The recorder of the call.
        x: The inputs.
        spec: The options.
        config: The kernel configuration.
        dims: The dqk and dhv of the states, K and V of the context.
        L: Steps of a tile.
        segment_steps: Steps of a segment.
        segments: Segments of all sequences.
        checkpoint_steps: Steps between checkpoints.
    """
    unbounded = x.log_f if x.cu_seqlens is None else x.cu_seqlens
    return LaunchContext(
        recorder=recorder, x=x, spec=spec, config=config, K=dims[0], V=dims[1], L=L, segment_steps=segment_steps,
        segments=segments, checkpoint_steps=checkpoint_steps, cu_seqlens=unbounded, schedule=unbounded,
    )  # fmt: skip


def fused_context(
    recorder: LaunchRecorder, x: Inputs, spec: Spec, *, config: KernelConfig, dims: tuple[int, int],
    checkpoint_steps: int, best_chunk_size: Callable[[Inputs], int],
) -> LaunchContext:  # fmt: skip
    """Return the context of a call of fused scans.

    Args:
        recorder: The recorder of the call.
        x: The inputs.
        spec: The options.
        config: The kernel configuration.
        dims: The dqk and dhv of the states.
        checkpoint_steps: Steps between checkpoints.
        best_chunk_size: Returns the chunk size of the smallest predicted time, for a call that leaves it open.
    """
    steps = config.segment_steps(spec.chunk_size if spec.chunk_size < DEFERRED_CHUNK_SIZE else best_chunk_size(x))
    return new_context(
        recorder, x, spec, config=config, dims=dims, L=config.tile_steps, segment_steps=steps,
        segments=count_segments(x, steps) if steps < x.v.shape[1] else x.sequences, checkpoint_steps=checkpoint_steps,
    )  # fmt: skip
