"""Garbage collection is paused while a CUDA graph is captured."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tfla._util.garbage_collection import paused_collection
from tfla.nn.decode import capture_graph


class Cycle:
    """An object that only the collection of garbage ends."""

    def __init__(self, held: object = None) -> None:
        self.held, self.itself = held, self


def collect_often() -> None:
    """Make so many containers that garbage is collected, where it is."""
    _ = [[[]] for _ in range(10_000)]


@pytest.fixture(autouse=True)
def often() -> object:
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)


def test_cycles_outlive_the_context() -> None:
    gone = weakref.ref(Cycle())
    collect_often()
    assert gone() is None
    with paused_collection():
        kept = weakref.ref(Cycle())
        collect_often()
        assert kept() is not None
    collect_often()
    assert kept() is None


def test_the_setting_of_before_is_restored() -> None:
    """It stays off where it was off, and is turned on again after an error."""
    with pytest.raises(RuntimeError, match="a capture failed"), paused_collection():
        raise RuntimeError("a capture failed")
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_that_is_garbage_does_not_end_a_capture() -> None:
    x, device = torch.ones(3, device="cuda"), torch.device("cuda", torch.cuda.current_device())

    def call() -> torch.Tensor:
        y = x + 1
        collect_often()
        return y * 2

    graph = capture_graph(call, device)[0]
    gc.disable()  # so that the graph is still there when the next capture begins
    Cycle(graph)
    del graph
    gc.enable()
    other, z = capture_graph(lambda: call() + 1, device)
    other.replay()
    assert z.tolist() == [5.0] * 3
