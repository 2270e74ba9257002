"""A replay drops large tensors after the last step that needs them, on every device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import delta_problem
from torch import Tensor

replay = pytest.importorskip("tfla.backends.gpu.replay")


class Address:
    """A stand-in for a tensor descriptor, which has an address and no reference to the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = weakref.ref(x)


@pytest.mark.parametrize("smallest", [0, 1 << 20])
def test_tensors_live_as_long_as_a_step_needs_them(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RELEASED_BYTES", smallest)
    alive: list[tuple[bool, ...]] = []
    made: list[Any] = []

    def noted(x: Tensor) -> Tensor:
        made.append(weakref.ref(x))
        return x

    def look(x: Any) -> Tensor:
        alive.append(tuple(ref() is not None for ref in made))
        return torch.zeros(3)

    def through_address(x: Address) -> Tensor:
        found = x.tensor()
        assert found is not None
        return found + 1

    given = torch.ones(3)
    recorder = replay.LaunchRecorder([given])
    a = recorder.do(lambda x: noted(x + 1), given)
    b = recorder.do(lambda x: noted(x * 2), a)
    recorder.do(look, given)
    address = recorder.do(Address, b)
    recorder.do(look, given)
    recorder.results = (recorder.do(through_address, address),)
    recorder.do(look, given)
    launches = replay.RecordedLaunches(recorder)
    del a, b, address
    recorder.made.clear()
    recorder.given = ()
    recorder.results = ()
    alive.clear()
    made.clear()
    assert launches([given])[0].tolist() == [5.0] * 3
    kept = smallest > 0
    assert alive == [(kept, True), (kept, True), (kept, kept)]


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_replays_that_drop_tensors_have_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfla._util import caching
    from tfla.backends import DELTA_BACKENDS

    monkeypatch.setattr(type(DELTA_BACKENDS["triton"]), "device_unsupported", lambda backend, q: None, raising=False)
    monkeypatch.setattr(replay, "RELEASED_BYTES", 0)
    caching.clear_caches()
    p = delta_problem(model, T=70, B=1, H=2, Hq=1, K=16, V=16, dtype=torch.float16)
    spec = p.spec("fused")

    def run() -> list[Tensor | None]:
        out = DELTA_BACKENDS["triton"].forward(p.x, spec)
        return [out.h, *DELTA_BACKENDS["triton"].backward(p.x, out, p.dh, p.dC.float(), spec)]

    first, again = run(), run()
    caching.clear_caches()
    for one, other in zip(first, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))
