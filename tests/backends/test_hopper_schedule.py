"""Tests of the schedule of packed sequences, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import pytest
import torch
from cases import INTERPRETED

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter"),
]
L = 64


class WorkTile(NamedTuple):
    segment: int
    first: int
    steps: int
    tile: int
    begins: bool
    ends: bool


def expected(lengths: tuple[int, ...], steps: int) -> list[WorkTile]:
    """Return the work tiles of at least one step, by decreasing length."""
    found, first = [], 0
    for s, length in enumerate(lengths):
        for n, start in enumerate(range(0, length, steps)):
            tile = first // L + s + start // L
            ends = start + steps >= length
            found.append(
                WorkTile(first // steps + s + n, first + start, min(steps, length - start), tile, start == 0, ends)
            )
        first += length
    return sorted(found, key=lambda work_tile: (-work_tile.steps, work_tile.segment))


@pytest.mark.parametrize("steps", [None, 64, 192])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (0, 5, 0), (64, 300, 128, 0, 300), (0, 0, 700, 1, 1, 64), tuple(7 * n % 90 for n in range(100))],
    ids=["one step", "empty", "several", "one long", "many"],
)
def test_longest_first(lengths: tuple[int, ...], steps: int | None) -> None:
    from tfla.backends.hopper.scheduler import schedule_packed

    T, N = sum(lengths), len(lengths)
    states, longest = (N, T + 1) if steps is None else (T // steps + N, steps)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    found = torch.full((states, 8), -1, dtype=torch.int32)
    schedule_packed[(-(-states // 16),)](
        cu_seqlens, found, N, longest, states, L=L, SEGMENT_BLOCK=16, SEQUENCE_BLOCK=64, num_warps=4
    )
    work_tiles = [WorkTile(*row[:4], bool(row[4]), bool(row[5])) for row in found.tolist()]
    used = expected(lengths, longest)
    assert work_tiles[: len(used)] == used
    assert all(work_tile.steps == 0 for work_tile in work_tiles[len(used) :])
    assert sorted(work_tile.segment for work_tile in work_tiles) == list(range(states))
