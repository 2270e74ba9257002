"""The choice of the segment length: a cost model of scans that run segments of a sequence in parallel.

A fused scan computes the tiles of one head of one sequence one after another. With few heads and sequences most
multiprocessors are idle. A sequence is then cut into segments, whose initial states take one more scan and a pass over
the states (:mod:`.state_passing`). Segments and chunks (`chunk_size` of the public function) have the same length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfla.backends.base import Inputs
from tfla.backends.gpu.config import SHORTEST_SEGMENT, KernelConfig, ceil_div, processors
from tfla.backends.gpu.runtime import planned_gpu


@dataclass(frozen=True)
class SegmentCost:
    """The constants of the cost model, measured on an H200. Times are in steps: the time of a scan for one step."""

    startup_steps: float  # time to start a segment
    two_pass_factor: float  # time of the scan for states and the scan for outputs, relative to the latter alone
    state_bytes_per_element: float  # bytes that state passing reads and writes for one element of a segment's state
    launch_steps: float  # time of the two or three additional launches
    min_speedup: float  # segments are chosen if they take less than this share of the time of whole sequences
    tail_factor: float  # time of a step of the longest sequence when the others are done, relative to other steps


COST = SegmentCost(
    startup_steps=384,
    two_pass_factor=1.4,
    state_bytes_per_element=16,
    launch_steps=128,
    min_speedup=0.9,
    tail_factor=0.75,
)
EULER = 0.577  # Euler's constant: the mean of the largest of n exponential variables of mean 1 is about log n + EULER


def best_chunk_size(x: Inputs, config: KernelConfig, programs_per_segment: int) -> int:
    """Return the chunk size with the smallest predicted time; at least the length T means one segment.

    The predicted time is the number of waves of programs times the time of the steps of one program. Offsets of packed
    sequences are not read, because that would wait for the GPU. Their longest length is estimated as the expected
    maximum of as many exponentially distributed lengths.

    Args:
        x: the inputs; q (B, T, Hq, dqk), v (B, T, H, dhv).
        config: the kernel configuration.
        programs_per_segment: how many programs share the scan of one segment of one head.
    """
    T, heads = x.v.shape[1], x.sequences * x.v.shape[2]
    if not x.q.is_cuda and planned_gpu(x.q.device) is None:
        return max(1, T)
    programs = heads * programs_per_segment
    available = processors(x.q.device) * config.programs_per_sm
    length, longest = T, 1.0
    if x.cu_seqlens is not None:
        length, longest = T // x.sequences, COST.tail_factor * (math.log(x.sequences) + EULER)
    K, V = x.q.shape[3], x.v.shape[3]
    # Time of state passing for one segment of every head, relative to the bytes that all resident programs move a step.
    state_passing = COST.state_bytes_per_element * heads * K * V / (2 * available * (K + V) * x.q.element_size())
    waves = max(longest, float(ceil_div(programs, available)))
    best, best_cost = T, COST.min_speedup * waves * (length + COST.startup_steps)
    for segments in range(2, min(length // SHORTEST_SEGMENT, 2 * ceil_div(available, max(1, programs))) + 1):
        steps = ceil_div(ceil_div(length, segments), config.tile_steps) * config.tile_steps
        waves = ceil_div(programs * segments, available)
        scans = COST.two_pass_factor * waves * (steps + COST.startup_steps)
        cost = scans + state_passing * segments + COST.launch_steps
        if cost < best_cost:
            best, best_cost = steps, cost
    return max(1, best)
