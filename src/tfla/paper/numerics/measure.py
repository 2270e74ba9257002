"""The errors of one implementation of the operator over a grid of settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from tfla.backends import BACKENDS, Inputs
from tfla.ops.gates import INPUT_GATES, InputGate
from tfla.paper.numerics.problem import REGIMES, Regime, Setting, Tensors, draw, relative_errors, rounded, solve

Row = dict[str, Any]
ROUNDING = "rounding"  # computed in float64, from inputs and to outputs rounded to the dtype
DTYPES = ("float32", "bfloat16", "float16")
RECURRENCE_UP_TO = 2048  # step by step from Python: longer ones take minutes


@dataclass(frozen=True)
class Grid:
    """The grid of settings: an axis of chunk sizes, one of regimes and one of lengths, for both gates.

    The other parameters are T steps, the regime "gaussian" on the axis of chunk sizes and "model" on the axis of
    lengths, and the default chunk size.
    """

    T: int = 8192
    chunk_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768, 65536)
    heads: int = 2
    dqk: int = 128
    dhv: int = 256

    def points(self, implementation: str, dtype: str) -> Iterator[tuple[Setting, int | None]]:
        """Yield the settings with their chunk size; those in float64 have at most RECURRENCE_UP_TO steps."""
        points: list[tuple[Regime, int, int | None]] = []
        if implementation != ROUNDING:
            points += [("gaussian", self.T, L) for L in self.chunk_sizes]
        points += [(regime, self.T, None) for regime in REGIMES]
        points += [("model", T, None) for T in self.lengths if T != self.T]
        if dtype == "float64":
            points = list(dict.fromkeys((regime, min(T, RECURRENCE_UP_TO), None) for regime, T, _ in points))
        for gate in INPUT_GATES:
            for regime, T, L in points:
                sizes = {"heads": self.heads, "dqk": self.dqk, "dhv": self.dhv}
                yield Setting(gate=cast(InputGate, gate), regime=regime, T=T, **sizes), L


def implementations(device: str) -> list[tuple[str, str]]:
    """Return the implementations that run on the device, each with a dtype.

    An implementation is named "backend kernel"; ROUNDING is rounding alone. One of them in float64 is the truth that
    the others are compared with.
    """
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


def measure(implementation: str, dtype: str, grid: Grid, device: str) -> Iterator[Row]:
    """Yield a row for each point: relative errors by quantity, the mean absolute error of h, and the seconds.

    The truth is computed from the inputs as rounded to the dtype, so that an error is that of the computation alone;
    for ROUNDING it is computed from the inputs that are not rounded. The truth is the chunkwise form in float64; that
    form itself is compared with the recurrence.
    """
    kind = getattr(torch, dtype)

    @lru_cache(2)
    def problem(setting: Setting) -> tuple[Tensors, Tensors]:
        whole = {name: t.to(device) for name, t in draw(setting).items()}
        x = rounded(whole, kind)
        start = whole if implementation == ROUNDING else {name: t.double() for name, t in x.items()}
        if dtype == "float64":
            return x, solve(start, setting.gate, "reference", "recurrent")
        return x, solve(start, setting.gate, "chunkwise")

    backend, _, kernel = implementation.partition(" ")
    for setting, chunk_size in grid.points(implementation, dtype):
        row: Row = {"implementation": implementation, "dtype": dtype, **asdict(setting), "chunk_size": chunk_size}
        begin = time.perf_counter()
        try:
            x, truth = problem(setting)
            if implementation == ROUNDING:
                wide = solve({name: t.double() for name, t in x.items()}, setting.gate, "chunkwise")
                out = {name: t.to(x[name.removeprefix("d")].dtype if name != "h" else kind) for name, t in wide.items()}
            else:
                out = solve(x, setting.gate, backend, kernel, chunk_size)
            row["error"] = relative_errors(out, truth)
            row["mean_absolute_error_h"] = (out["h"].double() - truth["h"]).abs().mean().item()
        except Exception as failure:  # whatever an implementation raises is its result
            row["failed"] = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:200]
        yield row | {"seconds": round(time.perf_counter() - begin, 3)}
