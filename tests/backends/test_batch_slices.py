"""A backward that computes batch rows or parts of the steps one after the other has the bits of one that does not."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import delta_problem
from test_hopper_delta import DTYPE, on_hopper, simulation, solve  # noqa: F401

from tfla._util import caching

batch_slices = pytest.importorskip("tfla.backends.gpu.batch_slices")
time_parts = pytest.importorskip("tfla.backends.gpu.time_parts")
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper

ALL, EACH = [(0, 2)], [(0, 1), (1, 2)]  # two batch rows at once, and one after the other
WHOLE, PARTS = [(0, 65)], [(0, 64), (64, 65)]  # all steps at once, and those of a tile and of another one
PROBLEMS: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]], list[tuple[int, int]]]] = {
    "KDA": ("kda", {}, EACH, WHOLE),
    "KDA, tiles that need levels": ("kda", {"gates": "half", "H": 2}, ALL, PARTS),
    "KDA, zeros as initial states": ("kda", {"carried": False, "K": 64, "V": 64}, EACH, PARTS),
    "read keys": ("gdn2", {}, ALL, PARTS),
    "GLA": ("gla", {"V": 64}, EACH, WHOLE),
    "GLA, two blocks of channels": ("gla", {"K": 256, "V": 64}, ALL, PARTS),
    "a gate for each step": ("simple", {}, ALL, PARTS),
}


@pytest.mark.parametrize(("model", "sizes", "rows", "steps"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_same_bits_in_parts(
    model: str, sizes: dict[str, Any], rows: list[tuple[int, int]], steps: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The last call replays the launches of the parts, which keep no tensor of the first one."""
    p = delta_problem(model, **{"B": 2, "T": 65, "H": 1, "Hq": 1, "K": 128, "V": 128, **sizes}, dtype=DTYPE)
    whole = solve(p, True)
    caching.clear_caches()
    found_rows: list[tuple[int, int]] = []
    found_steps: list[tuple[int, int]] = []
    recorders = []

    class Slice(batch_slices.BatchSlice):  # type: ignore[misc, name-defined]
        def __init__(self, ctx: Any, start: int, stop: int) -> None:
            super().__init__(ctx, start, stop)
            found_rows.append((start, stop))
            recorders.append(weakref.ref(ctx.recorder))

    class Part(time_parts.TimePart):  # type: ignore[misc, name-defined]
        def __init__(self, ctx: Any, start: int, stop: int) -> None:
            super().__init__(ctx, start, stop)
            found_steps.append((start, stop))

    for module in (batch_slices, time_parts):
        monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(batch_slices, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(batch_slices, "processors", lambda device: 1000 if rows == ALL else 1)
    monkeypatch.setattr(time_parts, "FEWEST_TILES", 1 if steps == PARTS else 2)
    monkeypatch.setattr("tfla.backends.triton.channel_rule.BatchSlice", Slice)
    monkeypatch.setattr("tfla.backends.triton.channel_rule.TimePart", Part)
    for _ in range(2):
        found = solve(p, True)
        different = [name for name, x in whole.items() if not torch.equal(x, found[name])]
        assert not different
    assert (found_rows, found_steps) == (rows, steps * len(rows))
    gc.collect()
    assert [recorder() for recorder in recorders] == [None] * len(rows)
    caching.clear_caches()


class FakeContext:
    """What `batch_slices` reads of a context."""

    L = 64

    def __init__(
        self, B: int, H: int, one_pointer_each: bool = False, T: int = 8192, packed: bool = False
    ) -> None:  # fmt: skip
        self.B, self.H, self.T, self.packed = B, H, T, packed
        self.x = self.recorder = self
        self.q = torch.zeros(0)
        self.one_pointer_each = one_pointer_each


def test_slices_take_no_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_slices, "processors", lambda device: 132)
    large = batch_slices.SMALLEST

    def sizes(B: int, H: int, shared_by: int, nbytes: int = large, T: int = 8192) -> list[int]:
        slices = batch_slices.batch_slices(FakeContext(B, H, T=T), shared_by, nbytes)
        assert slices[0][0] == 0
        assert slices[-1][1] == B
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(slices))
        return [stop - start for start, stop in slices]

    assert sizes(8, 32, 1) == [2] * 4
    assert sizes(8, 8, 4) == [2] * 4
    assert sizes(16, 32, 1) == [2] * 8
    assert sizes(8, 16, 1) == [4, 4]
    assert sizes(5, 32, 1) == [2, 2, 1]
    assert sizes(1, 256, 1) == [1]
    assert sizes(3, 100, 1) == [3]  # 300 take 5 rounds, 100 take 2
    assert sizes(8, 32, 1, large - 1) == [8]
    assert sizes(32, 32, 1, T=2048) == [8] * 4
    assert sizes(3, 64, 1, T=65536) == [1] * 3
    assert sizes(8, 64, 1, T=100) == [8]


def test_parts_are_halves_of_whole_tiles() -> None:
    def ends(T: int, nbytes: int = batch_slices.SMALLEST, **kwargs: bool) -> list[tuple[int, int]]:
        return time_parts.time_parts(FakeContext(2, 8, T=T, **kwargs), nbytes)

    assert ends(8192) == [(0, 4096), (4096, 8192)]
    assert ends(64 * 40 + 1) == [(0, 64 * 21), (64 * 21, 64 * 40 + 1)]
    assert ends(64 * 31 + 1) == [(0, 1024), (1024, 64 * 31 + 1)]
    assert ends(64 * 31) == [(0, 64 * 31)]
    for whole in (ends(8192, batch_slices.SMALLEST - 1), ends(8192, packed=True)):
        assert whole == [(0, 8192)]
