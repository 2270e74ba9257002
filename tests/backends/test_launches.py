"""Replayed calls make the launches of the recorded call, without Triton's look-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from tfla._util import caching
from tfla.backends.base import static
from tfla.backends.gpu import replay
from tfla.backends.gpu.replay import (
    CompiledLaunch,
    LaunchRecorder,
    RecordedLaunches,
    recorded_launches,
    recording,
)

Log = list[Any]


class Kernel:
    """A stand-in for a Triton kernel: a launch compiles it and returns the compiled kernel."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look_up(*args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> Any:
            self.log.append((f"looked up {self.name}", grid, args, num_warps, constants))
            return Compiled(self.name, self.log)

        return look_up


class Compiled:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream=None: self.log.append((self.name, grid, args))


class CompiledAsNow(Compiled):
    """A stand-in for a compiled kernel, with the attributes that Triton 3.4 to 3.9 have."""

    function, packed_metadata = "function", "metadata"

    def run(self, *args: Any) -> None:
        self.log.append(("at once", *args))


LaunchCode = Callable[[LaunchRecorder, Sequence[Tensor | None]], Sequence[Tensor]]


def record_or_replay(call: str, given: Sequence[Tensor | None], first: LaunchCode) -> Sequence[Tensor]:
    """The results of launch code, which runs at the first call alone."""
    recorded = recorded_launches(call)
    if recorded is not None:
        return recorded(given)
    with recording(call, given) as recorder:
        recorder.results = first(recorder, recorder.given)
    return recorder.results


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    caching.clear_caches()
    yield
    caching.clear_caches()


def test_kernels_are_looked_up_once() -> None:
    log: Log = []
    one, two = Kernel("one", log), Kernel("two", log)

    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        out = recorder.new(3)
        for kernel, x in ((one, given[0]), (two, out)):
            recorder.launch(kernel, (7, 2), x, given[1], 5, num_warps=4, WIDTH=64, REVERSE=True)
        return [out]

    calls = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
    (a,), (b,) = (record_or_replay("like this", given, first) for given in calls)
    x, y = calls[0]
    constants = {"WIDTH": 64, "REVERSE": True}
    assert log[:2] == [
        ("looked up one", (7, 2), (x, y, 5), 4, constants), ("looked up two", (7, 2), (a, y, 5), 4, constants)
    ]  # fmt: skip
    x, y = calls[1]
    assert log[2:] == [("one", (7, 2, 1), (x, y, 5, 64, True)), ("two", (7, 2, 1), (b, y, 5, 64, True))]
    assert a is not b
    record_or_replay("another", calls[0], first)
    assert log[4][0] == "looked up one"


def add(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return results of PyTorch's operations, in place and not; the second input may be None."""
    x, y = given
    assert x is not None
    dense = recorder.do(Tensor.contiguous, x)
    total = recorder.do(Tensor.copy_, recorder.new(*x.shape), dense)
    return [recorder.do(Tensor.add_, total, dense if y is None else y), total, dense]


@pytest.mark.parametrize("second", ["another", "the same", None])
def test_tensors_are_those_of_each_call(second: str | None) -> None:
    """A tensor that is given twice is two to the next call of these sizes."""
    x = torch.randn(4, 3).T
    y = {"another": torch.randn(3, 4), "the same": x, None: None}[second]
    record_or_replay("like this", (x, y), add)
    other = torch.randn(4, 3).T, None if y is None else torch.randn(4, 3).T
    found = record_or_replay("like this", other, lambda *_: pytest.fail("not repeated"))
    expected = other[0] + (other[0] if other[1] is None else other[1])
    assert torch.equal(found[0], expected)
    assert found[0] is found[1]
    assert torch.equal(found[2], other[0])
    assert found[2].is_contiguous()


def test_a_result_in_another_shape() -> None:
    """A launch fills what was allocated; the other results, and the recorded launches themselves, stay as they are."""

    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert given[0] is not None
        other = recorder.do(Tensor.clone, given[0])
        h = recorder.new(2, 1, 3)
        recorder.launch({(1,): fill}, (1,), h, 5.0, num_warps=4)
        return [other, h]

    def fill(h: Tensor, value: float, **options: Any) -> None:
        h.data.fill_(value)  # as a kernel does, unseen by version counters

    x = torch.ones(4)
    record_or_replay("like this", [x], first)
    recorded = recorded_launches("like this")
    assert recorded is not None
    other, h = recorded.with_shape(1, 2, 3)([2 * x])
    assert torch.equal(other, 2 * x)
    assert torch.equal(h, torch.full((2, 3), 5.0))
    assert recorded([x])[1].shape == (2, 1, 3)
    with pytest.raises(AssertionError, match="allocated by"):
        recorded.with_shape(0, 2, 2)


def test_nothing_is_kept_of_a_failure() -> None:
    def fails(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        recorder.new(3)
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        record_or_replay("like this", [torch.zeros(3)], fails)
    assert recorded_launches("like this") is None
    record_or_replay("like this", [torch.zeros(3)], lambda recorder, given: [recorder.new(3)])
    assert isinstance(recorded_launches("like this"), RecordedLaunches)


def test_tensors_that_the_tape_did_not_see_are_refused() -> None:
    recorder = LaunchRecorder([torch.zeros(3)])
    with pytest.raises(KeyError):
        recorder.launch(Kernel("one", []), (1,), torch.ones(3), num_warps=4)
    with pytest.raises(AssertionError, match="tensors come first"):
        recorder.launch(Kernel("one", []), (1,), recorder.new(3), 5, recorder.new(3), num_warps=4)


def test_writing_outside_of_the_recorder_is_refused() -> None:
    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return [recorder.new(3).zero_()]

    with pytest.raises(AssertionError, match="written outside of the recorder"):
        record_or_replay("like this", [torch.zeros(3)], first)
    with torch.inference_mode():
        record_or_replay(
            "inference", [torch.zeros(3)], lambda recorder, given: [recorder.do(Tensor.zero_, recorder.new(3))]
        )


def test_nothing_is_one_tensor_and_a_graph_may_keep_it() -> None:
    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return [recorder.placeholder(0, 3), recorder.placeholder(0, 3, dtype=torch.float16)]

    with torch.inference_mode():
        found = record_or_replay("like this", [torch.zeros(3)], first)
    again = record_or_replay("like this", [torch.zeros(3)], lambda *_: pytest.fail("not repeated"))
    for a, b, dtype in zip(found, again, (torch.float32, torch.float16), strict=True):
        assert a is b
        assert a.shape == (0, 3)
        assert a.dtype == dtype
        assert not a.is_inference()


def test_hooks_hear_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers set them; without one a launch goes past what prepares for them."""
    log: Log = []
    launch = CompiledLaunch(CompiledAsNow("plain", log), (7, 2))
    launch(11, replay.launch_hooks_active(), ["x", 5])
    assert log.pop() == ("plain", (7, 2, 1), ("x", 5))
    launch(11, replay.launch_hooks_active(), ["x", 5])
    assert log.pop() == ("at once", 7, 2, 1, 11, "function", "metadata", None, None, None, "x", 5)
    knobs = triton.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs, name)
        if chain is None:
            monkeypatch.setattr(knobs, name, print)
        else:
            chain.add(print)
        launch(11, replay.launch_hooks_active(), ["x", 5])
        if chain is None:
            monkeypatch.setattr(knobs, name, None)
        else:
            chain.remove(print)
        assert log.pop() == ("plain", (7, 2, 1), ("x", 5))
    launch(11, replay.launch_hooks_active(), ["x", 5])
    assert log.pop()[0] == "at once"
    assert not log


def test_a_triton_that_keeps_things_elsewhere() -> None:
    log: Log = []
    launch = CompiledLaunch(Compiled("plain", log), (7,))
    for _ in range(2):
        launch(11, False, ["x", 5])
        assert log.pop() == ("plain", (7, 1, 1), ("x", 5))


def test_what_distinguishes_tensors() -> None:
    x = torch.zeros(4, 8, 16)
    others = [x.half(), x[:2], x.transpose(0, 1), x.flatten()[1:-15].view(4, 2, -1)[:, :1], x.to("meta"), None]
    assert static([x]) == static([torch.ones(4, 8, 16)])
    assert len({static([each]) for each in (x, *others)}) == 7
