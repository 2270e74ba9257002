"""The chunkwise backend cuts its work into tiles, blocks and groups of heads; no cut changes a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Implementation, check, problem, solve, truth

from tfla.backends import chunkwise
from tfla.backends.chunkwise import gates, layout

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
    monkeypatch.setattr(layout, "MAX_TILES", tiles)
    monkeypatch.setattr(layout, "STATE_BYTES", states_in_a_block * 5 * 7 * 8)
    p = problem(T=50, **shape)
    implementation = Implementation("chunkwise", "segmented", device)
    check(solve(p, implementation), truth(p), p.dtype)
    check(solve(p, implementation, chunk_size=17), truth(p), p.dtype)


@pytest.mark.parametrize("least", [1.0, -6.0, -40.0], ids=["never", "in some tiles", "as it is"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_gates_taken_apart(monkeypatch: pytest.MonkeyPatch, device: str, form: str, least: float) -> None:
    """q and k may carry the weights of a tile or not, tile by tile, head by head."""
    recorded = []
    real = gates.TileGates.inside

    def inside(self: gates.TileGates, *args: Any) -> torch.Tensor:
        recorded.append(self.factored)
        return real(self, *args)

    monkeypatch.setattr(gates.TileGates, "inside", inside)
    monkeypatch.setattr(gates, "FACTORS", least)
    p = problem(form, T=300, f_mean=3.0)
    check(solve(p, Implementation("chunkwise", "segmented", device)), truth(p), p.dtype)
    factored = torch.cat([x.flatten() for x in recorded])
    assert {1.0: not factored.any(), -6.0: factored.any() and not factored.all(), -40.0: factored.all()}[least]


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_gates_are_taken_apart_without_loss(device: str, form: str) -> None:
    """Float32 keeps its accuracy where tiles decay by as much as may still be taken apart, and by more."""
    for f_mean in (0.5, 0.2, 0.0):
        p = problem(form, T=300, f_mean=f_mean, dtype=torch.float32)
        check(solve(p, Implementation("chunkwise", "segmented", device)), truth(p), p.dtype)
