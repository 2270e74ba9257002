"""Ctrl-C and SIGTERM during a training: the step is finished and saved first, and a second signal ends at once.

Python runs the handler of a signal between two of its instructions, which a long backward delays. A thread therefore
reads the signals' numbers from a pipe, into which Python's handler in C writes them at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 5.0  # in which a signal of one of several processes is the first one again, which torchrun passes on
GRACE_SECONDS = 1.0  # in which the main thread may begin to answer the second signal, before the process ends anyway


@contextmanager
def catch_stop_signals(tell: Callable[[str], None] | None, processes: int = 1) -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM: yield a list that receives the signal's number, so that the step can be finished first.

    A second signal ends the process: with the handler from before, or, where a long computation does not let it run,
    with the exit code 128 + number. An interactive interpreter is not ended so. Outside of the main thread no signal is
    caught.

    Args:
        tell: prints a line at the first signal; None prints nothing.
        processes: the number of processes of the run. A signal to one of several that comes once more within
            SAME_SECONDS is the same one, sent by the terminal and by torchrun, as the line then says.
    """
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {}
    asked = _Asked(tell, processes)

    def ask(number: int, frame: Any) -> None:
        if not stop:
            stop.append(number)
        if asked.again.is_set():  # the thread has seen the second signal
            asked.again.clear()
            asked.answered.set()
            _run_handler(before[number], number, frame)

    for own in STOPPING:
        before[own] = signal.signal(own, ask)
    try:
        with asked.reading():
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_handler(handler: Any, number: int, frame: Any) -> None:
    """Run the handler that a signal had before."""
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, handler)
    signal.raise_signal(signal.Signals(number))


_WRITTEN: list[int] = []  # the pipes into which Python writes the signals of this process


def _leave_pipes() -> None:
    """Let a child, just forked, write its signals into no pipe of its parent."""
    if _WRITTEN:
        signal.set_wakeup_fd(-1)
        _WRITTEN.clear()


if hasattr(os, "register_at_fork"):  # all systems but Windows
    os.register_at_fork(after_in_child=_leave_pipes)


class _Asked:
    """The thread that answers stop signals while the main thread computes.

    Attributes:
        again: set by a second signal until the main thread answers it.
        answered: set once the main thread has begun to answer, or has nothing to answer any more.
    """

    def __init__(self, tell: Callable[[str], None] | None, processes: int) -> None:
        self.tell, self.processes, self.main = tell, processes, threading.get_ident()
        self.again, self.answered, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.own = 0  # the signals that this thread has sent to the main thread and not read yet

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the numbers of signals within the context."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _WRITTEN.append(write)
        thread = threading.Thread(target=self._run, args=(read,), name="stop signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            self.answered.set()
            if write in _WRITTEN:  # not in a child
                _WRITTEN.remove(write)
                signal.set_wakeup_fd(before)
            os.write(write, b"\0")  # lets the thread end
            thread.join()
            os.close(read)
            os.close(write)

    def _run(self, read: int) -> None:
        """Answer signals until the context ends."""
        last = None
        while not self.ended.is_set():
            for number in os.read(read, 64):
                if number not in STOPPING:
                    continue
                now = time.monotonic()
                if last is None:
                    last = now
                    if self.tell is not None:
                        later = "" if self.processes == 1 else f" after {SAME_SECONDS:.0f} s"
                        with suppress(OSError, ValueError):  # a terminal that is closed
                            self.tell(
                                f"stopping: this step is finished and saved first; a second Ctrl-C{later} ends at once"
                            )
                elif self.own:
                    self.own -= 1
                elif self.processes == 1 or now > last + SAME_SECONDS:
                    last = now
                    self._end(number)

    def _end(self, number: int) -> None:
        """End the process, by the handler from before the context if the main thread runs it soon."""
        self.answered.clear()
        self.again.set()
        end = time.monotonic() + GRACE_SECONDS
        while True:
            self.own += 1
            signal.pthread_kill(self.main, number)  # wakes the main thread where it waits
            # Again, since a signal does not end a wait that begins right after it.
            if self.answered.wait(0.1) or time.monotonic() > end:
                break
        if not hasattr(sys, "ps1") and not self.answered.is_set():
            with suppress(OSError, ValueError):
                print("tfla: stopped", file=sys.stderr, flush=True)
            os._exit(128 + number)
