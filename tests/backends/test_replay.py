"""A replay drops large tensors after the last step that needs them, on every device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import delta_problem
from torch import Tensor

from tfla._util import caching
from tfla.ops import step_dispatch

replay = pytest.importorskip("tfla.backends.gpu.replay")


class Address:
    """A stand-in for a tensor descriptor, which has an address and no reference to the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = weakref.ref(x)


class Holder(Address):
    """A stand-in for one whose address has not been encoded, which has a reference to the tensor."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.base = x


@pytest.mark.parametrize("descriptor", [Address, Holder])
@pytest.mark.parametrize("smallest", [0, 1 << 20])
def test_tensors_live_as_long_as_a_step_needs_them(
    smallest: int, descriptor: type[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    address = recorder.do(descriptor, b)
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


@pytest.fixture
def without_fill() -> Iterator[None]:
    """Let torch.empty fill nothing, as it does by default."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0, 3), (5,)])
def test_direct_allocations_are_those_of_empty(shape: tuple[int, ...]) -> None:
    expected = torch.empty(shape, dtype=torch.float16)
    allocate = replay.direct_allocation(shape, torch.float16, torch.device("cpu"))
    assert allocate is not None
    found = allocate()
    assert (found.shape, found.stride(), found.dtype, found.device, found.is_inference()) == (
        expected.shape, expected.stride(), expected.dtype, expected.device, False,
    )  # fmt: skip
    with torch.inference_mode():
        assert allocate().is_inference()
    assert replay.direct_allocation(shape, torch.float16, torch.device("meta")) is None


def test_replays_allocate_directly_unless_allocations_are_filled(without_fill: None) -> None:
    given = torch.ones(3)
    recorder = replay.LaunchRecorder([given])
    memory = recorder.new(2, 3)
    result = recorder.do(torch.Tensor.add_, recorder.do(torch.Tensor.zero_, recorder.new(3)), given)
    recorder.results = memory, result
    launches = replay.RecordedLaunches(recorder).with_shape(0, 3, 2)
    allocations = [[step[0].func for step in steps[:2]] for steps in (launches.steps, launches.direct_steps)]
    assert allocations == [[torch.empty] * 2, [torch._C._dynamo.guards._empty_strided_cpu] * 2]
    assert [t.shape for t in launches([given])] == [(3, 2), (3,)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory, result = launches([given])
    assert memory.isnan().all()
    assert torch.equal(result, given)


def calls_of_a_step(gate: str) -> int:
    """Return how many functions, of Python and of C, are entered by one decoding step that replays its launches."""
    import tfla

    q, k, v, i, f = (torch.randn(1, 1, 4, *size) for size in ((16,), (16,), (16,), (), ()))
    state = tfla.State.zeros(1, 4, 16, 16, normalize=gate == "exp")
    entered: list[object] = []
    replayed: list[object] = []

    def count(frame: object, event: str, what: object) -> None:
        if event in ("call", "c_call"):
            entered.append(frame)

    def step() -> None:
        tfla.mlstm_steps(q, k, v, i, f, state, input_gate=gate, backend="triton")  # type: ignore[call-overload]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        step()
        plans = [*step_dispatch._PLANS.entries.values()]
        assert len(plans) == 1
        assert plans[0].replay is not None
        launch = lambda stream, hooks_active, args: replayed.append(args)  # noqa: E731
        recorded = plans[0].replay.direct_steps
        steps = [(launch if isinstance(rest, list) else fn, read, rest) for fn, read, rest in recorded]
        patch.setattr(plans[0].replay, "direct_steps", steps)
        patch.setattr(plans[0].replay, "address", Tensor.data_ptr)
        step()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert len(replayed) == 2
    return len(entered)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(("gate", "most"), [("sigmoid", 74), ("exp", 82)])
def test_a_decoding_step_enters_few_functions(gate: str, most: int, without_fill: None) -> None:
    caching.clear_caches()
    entered = calls_of_a_step(gate)
    caching.clear_caches()
    assert entered <= most
