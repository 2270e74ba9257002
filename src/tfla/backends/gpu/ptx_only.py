"""The compilation of the kernels of a plan to PTX alone, side by side, for hosts that assemble PTX themselves.

Triton assembles the PTX of each kernel by ptxas, in a process of its own. A host such as XLA does that once more, so
that the first result is not needed. What remains of a compilation is Triton's front end, which is Python and takes
about a fifth of the time, and passes of MLIR and LLVM, during which other threads run.
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

# An option of ptxas that does not exist. It marks kernels that are not assembled, and gives them entries of their own
# in Triton's cache.
MARK = "--assembled-by-another-host"
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
    """Leave out the assembly of a marked kernel, and end its front end with its first stage.

    Triton calls it with a backend, its stages and options, and from 3.7 on also without arguments, for a part of the
    key of kernels in memory.
    """
    if not given:
        return "assembled elsewhere", "assembled elsewhere"
    _, stages, options, *_ = given
    if getattr(options, "ptx_options", None) != MARK:
        return None
    stages["cubin"] = lambda ptx, metadata: b""
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
    if not active():
        return kernel.run(*args, warmup=True, **options)
    with FRONT_END:
        return kernel.run(*args, warmup=True, ptx_options=MARK, **options)


def awaited(compiled: Any) -> Any:
    """Return a compiled kernel, which may have been promised; raise the error of its compilation."""
    return compiled.result() if hasattr(compiled, "future") else compiled


@contextlib.contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Compile the kernels that a plan records inside this context in threads, to PTX alone.

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
