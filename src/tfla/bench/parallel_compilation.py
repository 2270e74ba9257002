"""The autotuning of Triton kernels in benchmarks: configurations are compiled in parallel and timed briefly."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

WARMUP, SAMPLES = 5, 20  # milliseconds for a configuration; with Triton's 25 and 100 a kernel with many takes minutes
PATIENCE = 120.0  # seconds after which this process compiles the remaining configurations


class Forked(Executor):
    """An executor that compiles in forked processes.

    Triton's front end is Python, so that threads would wait for each other. The processes leave their results in
    Triton's cache on disk, where this process finds them. They do not use the GPU, which a forked process cannot.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call until :meth:`finish`."""
        self.waiting.append((functools.partial(fn, *args, **kwargs), Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        """Compile everything that was submitted; the future of a configuration that fails holds its exception."""
        count = min(len(self.waiting), os.cpu_count() or 1)
        _wait([_fork([work for work, _ in self.waiting[n::count]]) for n in range(count)])
        for work, future in self.waiting:
            _settle(future, work)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Call ``work`` and set its result, or its exception, in the future."""
    try:
        future.set_result(work())
    except Exception as failed:
        future.set_exception(failed)


def _fork(works: list[Callable[[], Any]]) -> int:
    """Make all calls in a forked process and return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            for work in works:
                with contextlib.suppress(Exception):
                    work()
        finally:
            os._exit(0)  # without the exit handlers of the parent
    return pid


def _wait(children: list[int]) -> None:
    """Wait for processes, and kill those that take longer than PATIENCE."""
    end = time.monotonic() + PATIENCE
    while children and time.monotonic() < end:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the configurations of autotuned kernels in parallel inside this context, and time each only briefly.

    It has no effect before Triton 3.5, which has no asynchronous compilation. A configuration that fails to compile
    fails again, with its error, where Triton times it.
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
        if self._do_bench is None:  # the library leaves the timing to Triton
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
