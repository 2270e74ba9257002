"""The compilation of the kernels of a plan side by side, in threads.

Triton's front end is Python and takes about a fifth of the time. Other threads run during what follows, passes of MLIR
and LLVM and then ptxas in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import triton

from tfla.backends.gpu.runtime import INTERPRETED

THREADS = min(16, os.cpu_count() or 1)
# Some versions of Python do not parse in several threads at once (python/cpython#106905), and front ends would only
# wait for each other.
FRONT_END = threading.RLock()


def supported() -> bool:
    """Return whether this version of Triton has asynchronous compilation and lets its stages be changed."""
    return hasattr(triton, "AsyncCompileMode") and hasattr(triton.knobs.runtime, "add_stages_inspection_hook")


class _Compilation(threading.local):
    """The compilation that a thread is in, if any."""

    in_front_end = False

    def begin(self) -> None:
        """Wait for the front ends of other threads."""
        FRONT_END.acquire()
        self.in_front_end = True

    def end_front_end(self) -> None:
        """Let another thread begin."""
        if self.in_front_end:
            self.in_front_end = False
            FRONT_END.release()


_HERE = _Compilation()


def _change_stages(*given: Any) -> tuple[str, str] | None:
    """End the front end of a kernel with its first stage.

    Triton calls it with a backend, its stages and options, and from 3.7 on also without arguments, for what is added to
    the key of the cache on disk: nothing, since the stages compute what they always do.
    """
    if not given:
        return "", ""
    _, stages, *_ = given
    name, first = next(iter(stages.items()))

    def begin(module: Any, metadata: Any) -> Any:
        _HERE.end_front_end()
        return first(module, metadata)

    stages[name] = begin
    return None


class _Threads(ThreadPoolExecutor):
    """Threads that compile kernels; the front end of one of them runs at a time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a compilation."""

        def compiled() -> Any:
            _HERE.begin()
            try:
                return fn(*args, **kwargs)
            finally:
                _HERE.end_front_end()

        return super().submit(compiled)


@functools.cache
def _threads() -> _Threads:
    """Return the threads in which kernels are compiled."""
    return _Threads(THREADS, "tfla-compile")


def _knobs() -> Any:
    """Return Triton's settings of the runtime, which old versions do not have."""
    return getattr(getattr(triton, "knobs", None), "runtime", None)


def active() -> bool:
    """Return whether kernels are compiled side by side now."""
    return getattr(_knobs(), "add_stages_inspection_hook", None) is _change_stages


def compile_kernel(kernel: Any, *args: Any, **options: Any) -> Any:
    """Return a compiled kernel for these arguments, or side by side with others the promise of one."""
    with FRONT_END if active() else contextlib.nullcontext():
        return kernel.run(*args, warmup=True, **options)


def awaited(compiled: Any) -> Any:
    """Return a compiled kernel, which may have been promised; raise the error of its compilation."""
    return compiled.result() if hasattr(compiled, "future") else compiled


@contextlib.contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Compile the kernels that a plan records inside this context in threads.

    A recorded launch then holds the promise of a compiled kernel, see :func:`awaited`. The context ends once all are
    compiled; inside of another one it has no effect. Versions of Triton without what this needs compile as they always
    do.
    """
    if INTERPRETED or not supported() or active():
        yield
        return
    knobs = _knobs()
    before = knobs.add_stages_inspection_hook
    knobs.add_stages_inspection_hook = _change_stages
    try:
        with triton.AsyncCompileMode(_threads(), ignore_errors=True):
            yield
    finally:
        knobs.add_stages_inspection_hook = before
