"""Autotuned Triton kernels: their candidates are compiled side by side, then compared in turn, but briefly."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

WARMUP, SAMPLES = 5, 20  # milliseconds for a candidate; Triton takes 25 and 100, minutes for kernels with many
PATIENCE = 120.0  # seconds after which what still compiles is left to this process


class Forked(Executor):
    """Compiles in forked processes: threads would wait for each other, as Triton's front end is Python.

    What they compiled lies in Triton's cache when this process asks for it. They touch no GPU, which a forked process
    could not.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((functools.partial(fn, *args, **kwargs), Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        """All that was submitted; a candidate that fails does so again here, and is what its future holds."""
        count = min(len(self.waiting), os.cpu_count() or 1)
        _wait([_fork([work for work, _ in self.waiting[n::count]]) for n in range(count)])
        for work, future in self.waiting:
            _settle(future, work)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as failed:
        future.set_exception(failed)


def _fork(works: list[Callable[[], Any]]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            for work in works:
                with contextlib.suppress(Exception):
                    work()
        finally:
            os._exit(0)  # nothing of the parent's is to be tidied up
    return pid


def _wait(children: list[int]) -> None:
    end = time.monotonic() + PATIENCE
    while children and time.monotonic() < end:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Within, the first call of an autotuned kernel waits once for all of its candidates, not for each in turn, and
    times each for as long as decides between them.

    Without effect before Triton 3.5, which compiles in one thread. A candidate that fails does so again, and says how,
    where Triton compares it.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        yield
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found: list[Any] = prune(self, kwargs)
        if self._do_bench is None:  # the library does not say how
            self.do_bench = functools.partial(do_bench, warmup=WARMUP, rep=SAMPLES)
        given = self.nargs | {name: value for name, value in kwargs.items() if name != "warmup"}
        forked = Forked()
        with contextlib.suppress(Exception), AsyncCompileMode(forked, ignore_errors=True):
            try:
                for config in found:
                    self.fn.warmup(**given, **config.all_kwargs())
            finally:
                forked.finish()
        return found

    Autotuner.prune_configs = prune_and_compile
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
