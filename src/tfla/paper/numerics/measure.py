"""Errors of one way to compute the operator over a grid of settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from tfla.backends import BACKENDS, Inputs
from tfla.ops.gates import INPUT_GATES, InputGate
from tfla.paper.numerics.problem import REGIMES, Leaves, Regime, Setting, draw, relative_errors, rounded, solve

Row = dict[str, Any]
ROUNDING = "rounding"  # computed in float64, from inputs and to outputs rounded to the dtype
DTYPES = ("float32", "bfloat16", "float16")
RECURRENCE_UP_TO = 2048  # step by step from Python: longer ones take minutes


@dataclass(frozen=True)
class Grid:
    """What is measured: three axes through one point, for both gates.

    The point is T steps of the regime "gaussian" (by chunk size) or "model" (by length), at the default chunk size
    where that is not the axis.
    """

    T: int = 8192
    chunk_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768, 65536)
    heads: int = 2
    dqk: int = 128
    dhv: int = 256

    def points(self, way: str, dtype: str) -> Iterator[tuple[Setting, int | None]]:
        """Settings with their chunk size; only those up to RECURRENCE_UP_TO steps for float64."""
        wanted: list[tuple[Regime, int, int | None]] = []
        if way != ROUNDING:
            wanted += [("gaussian", self.T, L) for L in self.chunk_sizes]
        wanted += [(regime, self.T, None) for regime in REGIMES]
        wanted += [("model", T, None) for T in self.lengths if T != self.T]
        if dtype == "float64":
            wanted = list(dict.fromkeys((regime, min(T, RECURRENCE_UP_TO), None) for regime, T, _ in wanted))
        for gate in INPUT_GATES:
            for regime, T, L in wanted:
                yield Setting(cast(InputGate, gate), regime, T, self.heads, self.dqk, self.dhv), L


def ways(device: str) -> list[tuple[str, str]]:
    """(way, dtype) of what can run on the device: "backend kernel", and ROUNDING. float64 measures the truth itself."""
    found = [(ROUNDING, dtype) for dtype in DTYPES] + [("chunkwise segmented", "float64")]
    for backend in BACKENDS.values():
        if backend.name == "reference":
            continue
        for dtype in DTYPES:
            q, v = (torch.zeros(1, 16, 2, d, dtype=getattr(torch, dtype), device=device) for d in (128, 256))
            gate = torch.zeros(1, 16, 2, device=device)
            if backend.unsupported(Inputs(q, q, v, gate, gate, None, None, None, None)) is None:
                found += [(f"{backend.name} {kernel}", dtype) for kernel in backend.kernels]
    return found


def measure(way: str, dtype: str, grid: Grid, device: str) -> Iterator[Row]:
    """A row for every point: relative errors by quantity, the mean absolute error of h, seconds it took.

    The truth starts from the inputs as rounded to the dtype, so an error is the computation's own; for ROUNDING it
    starts from the unrounded ones. It is the chunkwise form in float64, and for that itself, the recurrence.
    """
    kind = getattr(torch, dtype)

    @lru_cache(2)
    def problem(setting: Setting) -> tuple[Leaves, Leaves]:
        whole = {name: t.to(device) for name, t in draw(setting).items()}
        x = rounded(whole, kind)
        start = whole if way == ROUNDING else {name: t.double() for name, t in x.items()}
        if dtype == "float64":
            return x, solve(start, setting.gate, "reference", "recurrent")
        return x, solve(start, setting.gate, "chunkwise")

    backend, _, kernel = way.partition(" ")
    for setting, chunk_size in grid.points(way, dtype):
        row: Row = {"way": way, "dtype": dtype, **asdict(setting), "chunk_size": chunk_size}
        begin = time.perf_counter()
        try:
            x, truth = problem(setting)
            if way == ROUNDING:
                wide = solve({name: t.double() for name, t in x.items()}, setting.gate, "chunkwise")
                out = {name: t.to(x[name.removeprefix("d")].dtype if name != "h" else kind) for name, t in wide.items()}
            else:
                out = solve(x, setting.gate, backend, kernel, chunk_size)
            row["error"] = relative_errors(out, truth)
            row["mean_absolute_error_h"] = (out["h"].double() - truth["h"]).abs().mean().item()
        except Exception as failure:  # whatever a way raises is its result
            row["failed"] = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:200]
        yield row | {"seconds": round(time.perf_counter() - begin, 3)}
