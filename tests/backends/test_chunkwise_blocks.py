"""Chunkwise cuts its work into tiles, blocks and groups of heads to fit caches: no cut changes a result."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Way, check, problem, solve, truth

from tfla.backends import chunkwise

SHAPES: dict[str, dict[str, Any]] = {
    "heads alone": {"Hq": 4, "H": 4},
    "three heads share keys": {"Hq": 2, "H": 6},
    "all heads share keys": {"Hq": 1, "H": 5},
    "packed": {"Hq": 2, "H": 4, "lengths": (0, 30, 1, 99, 0)},
}


@pytest.mark.parametrize("states_in_a_block", [1, 7, 1000])
@pytest.mark.parametrize("tile", [1, 5, 64])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_cuts(
    monkeypatch: pytest.MonkeyPatch, device: str, shape: dict[str, Any], tiles: int, tile: int, states_in_a_block: int
) -> None:
    monkeypatch.setattr(chunkwise, "TILE", tile)
    monkeypatch.setattr(chunkwise, "MAX_TILES", tiles)
    monkeypatch.setattr(chunkwise, "STATE_BYTES", states_in_a_block * 5 * 7 * 8)
    p = problem(T=50, **shape)
    way = Way("chunkwise", "segmented", device)
    check(solve(p, way), truth(p), p.dtype)
    check(solve(p, way, chunk_size=17), truth(p), p.dtype)
