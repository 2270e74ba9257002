"""Losses that the host reads one step late: the order of records, checkpoints and signals, and seconds of steps."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel
from tfla.train import loop
from tfla.train.checkpoint import Checkpoints
from tfla.train.config import TrainConfig
from tfla.train.logging import Metrics, read_metrics
from tfla.train.loop import train
from tfla.train.recipe import ClippedReading

Hook = Callable[[str, int], None]


@pytest.fixture
def on_event(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """Return a function that lets a hook be called at every forward, record and checkpoint: kind and step."""

    def arrange(hook: Hook) -> None:
        losses, write, save = loop.token_losses, Metrics.write, Checkpoints.save
        forwards: list[int] = []

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            forwards.append(1)
            found = losses(*args, **kwargs)
            hook("forward", len(forwards))
            return found

        def record(self: Metrics, kind: str, step: int, **values: Any) -> None:
            write(self, kind, step, **values)
            hook(kind, step)

        def checkpoint(self: Checkpoints, step: int, *args: Any) -> Any:
            hook("save", step)
            return save(self, step, *args)

        monkeypatch.setattr(loop, "token_losses", forward)  # of training; an evaluation has its own name of it
        monkeypatch.setattr(Metrics, "write", record)
        monkeypatch.setattr(Checkpoints, "save", checkpoint)

    return arrange


def same_records(config: TrainConfig) -> list[tuple[Any, ...]]:
    """Return the records of a run that must be bitwise equal, in order."""
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm")) for r in read_metrics(config.run)]


def final_weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    return LanguageModel.from_pretrained(config.run / "checkpoints" / f"step-{config.steps:08d}").state_dict()


def test_a_step_is_recorded_after_the_next_is_enqueued_and_before_it_is_evaluated_or_saved(tiny, on_event) -> None:
    events: list[tuple[str, int]] = []
    on_event(lambda kind, step: events.append((kind, step)))
    train(tiny(steps=8, eval_every=4, checkpoint_every=3))
    assert events == [
        ("eval", 0), ("forward", 1), ("forward", 2), ("train", 1), ("forward", 3), ("train", 2), ("train", 3),
        ("save", 3), ("forward", 4), ("train", 4), ("eval", 4), ("forward", 5), ("forward", 6), ("train", 5),
        ("train", 6), ("save", 6), ("forward", 7), ("forward", 8), ("train", 7), ("train", 8), ("eval", 8), ("save", 8),
    ]  # fmt: skip


@pytest.mark.parametrize("spoilt", range(1, 9))
def test_a_loss_that_is_not_finite_is_that_of_its_step_and_in_no_checkpoint(tiny, monkeypatch, spoilt: int) -> None:
    config = tiny(steps=8, checkpoint_every=3, eval_every=4)
    real, calls = loop.token_losses, []

    def spoil(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return real(*args, **kwargs) * (float("nan") if len(calls) == spoilt else 1)

    monkeypatch.setattr(loop, "token_losses", spoil)
    with pytest.raises(UserError, match=rf"^step {spoilt}: loss nan, gradient norm nan: training has failed"):
        train(config)
    assert [r["step"] for r in read_metrics(config.run) if r["kind"] == "train"] == list(range(1, spoilt))
    saved = {path.name for path in config.run.glob("checkpoints/step-*")}
    assert saved == {f"step-{step:08d}" for step in (3, 6) if step < spoilt}


@pytest.mark.parametrize(
    ("kind", "step", "stops"),
    [("forward", 1, 1), ("forward", 3, 3), ("train", 1, 2), ("train", 3, 4), ("train", 5, 6), ("eval", 4, 4)],
)
def test_a_run_that_a_signal_stops_continues_as_if_it_had_not(
    tiny, tmp_path, on_event, monkeypatch, kind: str, step: int, stops: int
) -> None:
    """A signal stops after the step that is enqueued then, which is recorded and saved."""
    whole, stopped = (tiny(run=tmp_path / name, eval_every=4, checkpoint_every=100) for name in ("whole", "stopped"))
    train(whole)

    def ask(*event: Any) -> None:
        if event == (kind, step):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context():
        on_event(ask)
        found = train(stopped)
    monkeypatch.undo()
    assert (found.step, found.signal) == (stops, signal.SIGINT)
    assert [r["step"] for r in read_metrics(stopped.run) if r["kind"] == "train"] == list(range(1, stops + 1))
    assert [path.name for path in stopped.run.glob("checkpoints/step-*")] == [f"step-{stops:08d}"]
    assert train(stopped).step == whole.steps
    assert same_records(stopped) == same_records(whole)
    expected = final_weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(stopped).items())


@pytest.mark.parametrize(
    ("enqueue", "compute"), [(0.25, 1.0), (1.0, 0.25), (1.0, 0.0)], ids=["device", "host", "no device"]
)
def test_a_step_takes_the_seconds_between_two_readings(tiny, monkeypatch, enqueue: float, compute: float) -> None:
    """The clock is that of a host and a device, of which one is slower; evaluations and checkpoints take 100 s each.

    Without a device a step is computed while it is enqueued.
    """
    now, ends = 0.0, [0.0]  # of the host, and of what the device has to compute

    def enqueued(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now += enqueue
        ends.append(max(now, ends[-1]) + compute)
        return clipped_gradients(*args, **kwargs)

    def read(self: ClippedReading) -> tuple[float, ...]:
        nonlocal now, finished
        finished += 1
        now = max(now, ends[finished])
        return wait(self)

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += 100.0
            return function(*args, **kwargs)

        return wrapped

    finished, clipped_gradients, wait = 0, loop.clipped_gradients, ClippedReading.read
    monkeypatch.setattr(loop, "clipped_gradients", enqueued)
    monkeypatch.setattr(ClippedReading, "read", read)
    monkeypatch.setattr(ClippedReading, "arrived", lambda self: ends[-1] <= now)
    monkeypatch.setattr(loop, "evaluate", slow(loop.evaluate))
    monkeypatch.setattr(Checkpoints, "save", slow(Checkpoints.save))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))
    config = tiny(steps=12, eval_every=5, checkpoint_every=8)
    train(config)
    steps = [r for r in read_metrics(config.run) if r["kind"] == "train"]
    seconds = [config.batch_size * config.context / r["tokens_per_s"] for r in steps]
    own_start = enqueue + compute  # of the steps after which the host has waited
    if compute > enqueue:
        expected = [own_start if step in (1, 6, 9, 11) else compute for step in range(1, 13)]
        assert seconds == pytest.approx(expected)
    if not compute:
        assert seconds == pytest.approx([enqueue] * 12)
    assert max(seconds) < 3 * max(enqueue, compute)
    assert steps[-1]["elapsed"] == pytest.approx(sum(seconds))
    assert sum(seconds) == pytest.approx(now - 6 * 100.0)  # four evaluations and two checkpoints


@pytest.mark.parametrize("pattern", [(False, True), (True, False), (False, False, True), (True, True, False)], ids=str)
def test_steps_that_the_device_has_computed_at_times_when_they_are_enqueued_take_seconds(tiny, monkeypatch, pattern):
    """A device that is about as fast as its host has computed some steps by the time they are enqueued."""
    now, calls = 0.0, itertools.cycle(pattern)

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(ClippedReading, "arrived", lambda self: next(calls))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=tick))
    config = tiny(steps=12, eval_every=5, checkpoint_every=8)
    train(config)
    steps = [r for r in read_metrics(config.run) if r["kind"] == "train"]
    seconds = [config.batch_size * config.context / r["tokens_per_s"] for r in steps]
    assert min(seconds) > 0
    assert max(seconds) <= 4
    assert [r["elapsed"] for r in steps] == pytest.approx(list(itertools.accumulate(seconds)))
