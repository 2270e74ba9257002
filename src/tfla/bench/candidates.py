"""Autotuned Triton kernels: their candidates are compiled side by side, then compared in turn, but briefly."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WARMUP, SAMPLES = 5, 20  # milliseconds for a candidate; Triton takes 25 and 100, minutes for kernels with many


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
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            contextlib.suppress(Exception),
            AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in found:
                self.fn.warmup(**given, **config.all_kwargs())
        return found

    Autotuner.prune_configs = prune_and_compile
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
