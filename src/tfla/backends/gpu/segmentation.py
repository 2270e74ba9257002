"""How many segments a sequence is cut into, from a count of what segments cost."""

from __future__ import annotations

import math
from typing import Any

from tfla.backends.base import Inputs
from tfla.backends.gpu.config import SHORTEST_SEGMENT, ceil_div, processors

# What segments cost on an H200, in steps of a walk: to begin one; the walk for their states beside the others; bytes of
# an element of a state that joining them reads and writes; two or three launches more. They are worth it where they
# take less than BETTER.
BEGIN, BOTH_WALKS, JOINED, LAUNCHES, BETTER = 384, 1.4, 16, 128, 0.9
ALONE = 0.75  # of the time of a walk, when few others move bytes
EULER = 0.577  # the longest of n exponentially distributed lengths is log n + EULER times their mean


def best_chunk_size(x: Inputs, kind: Any) -> int:
    """Segments only where whole sequences leave multiprocessors idle: waves of programs times steps of each.

    Lengths of packed sequences are not read: the longest is taken to be what it is in the mean among as many that are
    exponentially distributed. It takes ALONE of its time, the others being done.
    """
    T, heads = x.v.shape[1], x.sequences * x.v.shape[2]
    if not x.q.is_cuda:
        return max(1, T)
    programs, plan = heads * kind.programs(x), kind.plan_for(x)
    available = processors(x.q.device) * plan.together
    length, longest = T, 1.0
    if x.cu_seqlens is not None:
        length, longest = T // x.sequences, ALONE * (math.log(x.sequences) + EULER)
    K, V = x.q.shape[3], x.v.shape[3]
    # In steps: of as many programs as there is room for, reading and writing, each moves the bytes of one.
    join = JOINED * heads * K * V / (2 * available * (K + V) * x.q.element_size())
    best, best_cost = T, BETTER * max(longest, float(ceil_div(programs, available))) * (length + BEGIN)
    for pieces in range(2, min(length // SHORTEST_SEGMENT, 2 * ceil_div(available, max(1, programs))) + 1):
        steps = ceil_div(ceil_div(length, pieces), plan.L) * plan.L
        cost = BOTH_WALKS * ceil_div(programs * pieces, available) * (steps + BEGIN) + join * pieces + LAUNCHES
        if cost < best_cost:
            best, best_cost = steps, cost
    return max(1, best)
