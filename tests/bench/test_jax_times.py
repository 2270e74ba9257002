"""The calls and samples of `tfla.bench.jax_times`."""

from __future__ import annotations

import argparse
import time

import pytest

from tfla.bench import jax_calls, jax_times
from tfla.bench.jax_calls import Operation, Ready


def test_samples_in_turn_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls are repeated more often, runs of two calls alternate, and two of each come before the samples."""
    now, waited = [0.0], []
    monkeypatch.setattr(jax_calls.time, "perf_counter", lambda: now[0])

    def ready(name: str, seconds: float) -> Ready:
        def call() -> str:
            now[0] += seconds
            return name

        return Ready("forward", 0.0, 0, call, waited.append)

    found = jax_calls.samples_in_turn([ready("short", 1e-3), ready("long", 0.05)], 5, 20)
    assert [times["seconds"] for times in found] == [pytest.approx(1e-3), pytest.approx(0.05)]
    assert all(times["samples"] == 5 for times in found)
    assert waited == ["short", "long"] * 7
    assert now[0] == pytest.approx((20 + 6 * 100) * 1e-3 + 7 * 20 * 0.05)


def test_cases() -> None:
    """First calls have processes of their own, and samples of this library are taken in one, in turn."""
    options = argparse.Namespace(
        models=["mlstm", "gdn"], head_dims=["64x128"], forms=["exp"], lengths=[512, 1024],
        names=["PyTorch", "JAX", "mlstm_kernels.jax"],
    )  # fmt: skip
    own, others = jax_times._cases(options)
    found = own + others
    assert [case.names for case in others] == [("mlstm_kernels.jax",)] * 2
    assert [(case.names, case.first, case.samples) for case in found] == [
        *[((name,), True, False) for _ in range(3) for name in ("PyTorch", "JAX")],
        *[(("PyTorch", "JAX"), False, True)] * 3,
        *[(("mlstm_kernels.jax",), True, True)] * 2,
    ]
    assert [(case.operation.model, case.operation.T) for case in found[6:]] == [
        ("mlstm", 512), ("mlstm", 1024), ("gdn", 8192), ("mlstm", 512), ("mlstm", 1024)
    ]  # fmt: skip
    assert found[0].operation.shapes[2] == (jax_calls.TOKENS // 512, 512, 16, 128)


def test_rows_of_several_processes_are_merged() -> None:
    """What is known of a first call and the samples become one row; an error does not hide the other direction."""
    facts = {"name": "JAX", "model": "gdn", "form": "", "heads": 16, "dqk": 128, "dhv": 128, "x": 8192}
    forward = facts | {"direction": "forward"}
    rows = [forward | {"first_seconds": 5.0}, facts | {"error": "no memory"}, forward | {"seconds": 1e-3}]
    assert jax_times._merged(rows) == [
        forward | {"first_seconds": 5.0, "seconds": 1e-3},
        facts | {"error": "no memory"},
    ]


def test_one_that_fails_does_not_hide_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row has its own error, and the other one is sampled."""

    def refused(*_: object) -> None:
        raise ImportError("no jax")

    monkeypatch.setattr(jax_times, "from_jax", refused)
    monkeypatch.setattr(jax_times, "from_torch", lambda _: [Ready("forward", 0.0, 0, int, lambda _: None)])
    case = jax_times.Case(Operation("mlstm", "exp", 1, 8, 16, 16), ("PyTorch", "JAX"), False, True)
    monkeypatch.setattr(jax_calls, "SAMPLE", 0.0)
    own, other = jax_times.measure(case, 1, 1)
    assert (own["name"], own["samples"]) == ("PyTorch", 1)
    assert other == {"name": "JAX", "error": "ImportError: no jax"}


def test_a_process_that_is_killed_has_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_times.sys, "executable", "false")  # a program that fails
    options = argparse.Namespace(repeats=1, calls=1, lock=None, out=None)
    case = jax_times.Case(Operation("gdn", "", 16, 128, 128, 8192), ("PyTorch", "JAX"), False, True)
    rows = jax_times._in_a_process(case, options, time.monotonic() + 60.0)
    assert [(row["name"], row["model"], row["x"], row["error"]) for row in rows] == [
        (name, "gdn", 8192, "the process ended with status 1") for name in case.names
    ]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--names", "Jax"], "invalid choice: 'Jax'"),
        (["--forms", "log"], "invalid choice: 'log'"),
        (["--lengths", "1000"], "--lengths: got 1000, expected divisors of 65536"),
        (["--calls", "0"], "--calls or --workers: got less than 1"),
    ],
)
def test_options(
    option: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is none of the implementations would be timed as another library."""
    monkeypatch.setattr(jax_times.sys, "argv", ["jax_times", "--out", "unused.json", *option])
    with pytest.raises(SystemExit):
        jax_times.main()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("model", ["mlstm", "gdn", "kda", "gla"])
def test_small_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model runs on the CPU, by XLA, and gives a row for each direction."""
    pytest.importorskip("jax")
    monkeypatch.setattr(jax_calls, "TOKENS", 32)
    monkeypatch.setattr(jax_calls, "SAMPLE", 1e-9)
    operation = Operation(model, "exp" if model == "mlstm" else "", 1, 8, 16, 16)
    rows = jax_times.measure(jax_times.Case(operation, ("JAX",), True, True), 1, 1, backend="chunkwise")
    assert [row["direction"] for row in rows] == list(jax_calls.DIRECTIONS)
    assert all(row["name"] == "JAX" and row["seconds"] > 0 and row["first_seconds"] > 0 for row in rows)
