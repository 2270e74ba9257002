"""Signals that stop a training, also while a step computes for long in C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tfla.train.checkpoint import Checkpoints
from tfla.train.logging import Metrics
from tfla.train.loop import train
from tfla.train.stop_signals import catch_stop_signals

# The third step waits in C for a mutex that nothing unlocks, and runs no instruction of Python.
BLOCKED = """
import ctypes, sys, threading
from tfla import cli
from tfla.train import loop

compute, calls, libc = loop.token_losses, [], ctypes.CDLL(None)

def block(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        mutex = (ctypes.c_char * 128)()
        libc.pthread_mutex_lock(mutex)
        threading.Timer(1, print, ["blocked"], {"flush": True}).start()  # when it is
        libc.pthread_mutex_lock(mutex)
    return compute(*args, **kwargs)

loop.token_losses = block
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses the C library of Linux")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_long_step_answers_at_once(texts: Path, tmp_path: Path, number: int, code: int) -> None:
    args = ["train", "--run", str(tmp_path / "run"), "--data.paths", str(texts), "--steps", "5", "--batch-size", "2"]
    args += ["--context", "16", "--model.d-model", "32", "--model.num-blocks", "1", "--model.num-heads", "2"]
    args += ["--checkpoint-every", "1", "--optim.warmup-steps", "1", "--optim.cooldown-steps", "1", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(number)
        for line in process.stderr:
            if "stopping: this step is finished and saved first; a second Ctrl-C ends at once" in line:
                break
        else:
            pytest.fail("the process ended without a line")
        assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert out == ""  # no result
    assert err.endswith("tfla: stopped\n")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "step-00000002"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_in_the_way_it_did_before(tiny, monkeypatch, capsys, second: int) -> None:
    class EndedError(Exception):
        pass

    def end(number: int, frame: object) -> None:
        assert number == second
        raise EndedError

    def ask(self: Metrics, kind: str, at: int, **values: object) -> None:
        if (kind, at) == ("train", 3):
            for number in (signal.SIGINT, second):
                os.kill(os.getpid(), number)
            for _ in range(1000):  # a signal just before a long sleep would not end it
                time.sleep(0.03)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    fd = signal.set_wakeup_fd(-1)
    try:
        monkeypatch.setattr(Metrics, "write", ask)
        with pytest.raises(EndedError):
            train(tiny())
        assert all(signal.getsignal(number) is end for number in before)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err.count("stopping: this step is finished") == 1


def test_a_signal_while_the_last_step_is_saved_ends_nothing(tiny, monkeypatch) -> None:
    finish = Checkpoints.finish

    def ask(self: Checkpoints) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finish(self)

    monkeypatch.setattr(Checkpoints, "finish", ask)
    result = train(tiny())
    assert (result.step, result.signal) == (8, None)


@pytest.mark.parametrize(("processes", "later"), [(1, ""), (2, " after 5 s")])
def test_the_line_says_when_a_second_signal_counts(processes: int, later: str) -> None:
    lines: list[str] = []
    with catch_stop_signals(lines.append, processes) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        _wait_for(lambda: bool(stop and lines))
    assert lines == [f"stopping: this step is finished and saved first; a second Ctrl-C{later} ends at once"]


def _wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


# A terminal sends Ctrl-C to a process and to the child that it has forked.
FORKED = """
import os, signal, time
from tfla.train.stop_signals import catch_stop_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
lines = []
read, write = os.pipe()
with catch_stop_signals(lines.append) as stop:
    child = os.fork()
    if not child:
        os.write(write, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)  # until it has left the pipe of its parent's signals
    os.kill(child, signal.SIGINT)
    time.sleep(1)
    found = len(lines), list(stop)
    os.kill(os.getpid(), signal.SIGINT)
    while not lines:
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    time.sleep(1)
os.kill(child, signal.SIGKILL)
print(found, len(lines), stop)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_signal_of_a_forked_child_is_none_of_its_parent() -> None:
    found = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "(0, []) 1 [2]\n"), found.stderr


# What the second signal raises is cleaned up for longer than the process waits for it.
CLEANED = """
import os, signal, time
from tfla.train import stop_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
stop_signals.GRACE_SECONDS = 8  # also for a machine that is busy
lines = []
with stop_signals.catch_stop_signals(lines.append):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while not lines:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    finally:
        print("begins", flush=True)
        time.sleep(9)
        print("ends", flush=True)
"""


def test_a_second_signal_lets_the_process_clean_up() -> None:
    found = subprocess.run([sys.executable, "-c", CLEANED], capture_output=True, text=True, timeout=120)
    assert found.stdout == "begins\nends\n"
    assert found.stderr.endswith("KeyboardInterrupt\n")
