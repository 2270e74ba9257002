"""The values of the claims about the theory of the runtime (appendix G)."""

from __future__ import annotations

import math

from tfla.bench.stored import load
from tfla.measure.accelerators import ACCELERATORS
from tfla.paper.algorithms.optimum import runtime_optimal_chunk
from tfla.paper.chunk_timings import BATCH, SHAPE, SUITE, TILE, ChunkTimings, H, sig_forward
from tfla.paper.claims_template import Values, fill
from tfla.paper.report_types import Claim, Options, Table
from tfla.paper.runtime import SIG, intensity
from tfla.paper.time_bounds import LENGTH, compare_with_bounds
from tfla.paper.time_bounds import SUITE as BOUNDS_SUITE


def optimal_chunk(dhv: float, flop_per_byte: float) -> float:
    """Return the runtime-optimal chunk size (121) of mLSTMsig's forward for dqk = dhv / 2."""
    return float(runtime_optimal_chunk(dhv, 0.5, flop_per_byte))


def _missing(suite: str) -> str:
    """Return the sentence for a suite that has no stored result."""
    return f"This was not measured: there is no `benchmarks/results/{suite}.json`."


def _bound_by() -> Values:
    """Return the smallest chunk size whose intensity is above that of each accelerator."""

    def crossing(name: str) -> str:
        roof = ACCELERATORS[name].intensity
        return f"{next(L for L in range(16, 8192) if intensity(SIG, L=L, **SHAPE) > roof):,}"

    return {name: crossing(name) for name in ("A100", "H100", "H200")}


def _optimum_grows() -> Values:
    """Return the exponents with which the optimal chunk size grows with the head dim and the intensity."""
    by_width = math.log(optimal_chunk(1024, 295) / optimal_chunk(256, 295)) / math.log(4)
    by_intensity = math.log(optimal_chunk(512, 400) / optimal_chunk(512, 100)) / math.log(4)
    return {"by_width": f"{by_width:.2f}", "by_intensity": f"{by_intensity:.2f}"}


def _newer_hardware() -> Values:
    """Return the optimal chunk size on each accelerator."""
    return {name: f"{optimal_chunk(512, a.intensity):.0f}" for name, a in ACCELERATORS.items()}


def _measured_optimum(timings: ChunkTimings) -> Values:
    """Compare the fastest measured chunk sizes with the optimum of the theory."""
    gpu = "H200" if "H200" in timings.where else "H100"
    rows = []
    for name, curve in timings.quadratic.items():
        several = {x: t for x, t in curve.items() if x > TILE}
        if several:
            best = min(several, key=lambda x: several[x])
            one_tile = f"{curve[TILE] * 1e3:.2f}" if TILE in curve else "-"
            rows.append([name, f"{best:,}", f"{several[best] * 1e3:.2f}", one_tile])
    header = [
        "kernel",
        "fastest chunk of several tiles",
        "forward, ms",
        f"forward with chunks of one tile ({TILE}), ms",
    ]
    return {
        "theory_H100": f"{optimal_chunk(512, ACCELERATORS['H100'].intensity):.0f}",
        "theory": f"{optimal_chunk(512, ACCELERATORS[gpu].intensity):.0f}",
        "gpu": gpu,
        "where": timings.where,
        **({"table": Table(header, rows)} if rows else {"missing": _missing(SUITE)}),
    }


def _flop_rate(timings: ChunkTimings) -> Values:
    """Compare FLOP/s and time at the fastest and at the largest chunk size."""
    rows = []
    for name, curve in timings.quadratic.items():
        fastest, largest = min(curve, key=lambda x: curve[x]), max(curve)
        rates = {L: float(SIG.flops(L=L, **SHAPE)) * BATCH * H / curve[L] for L in (fastest, largest)}
        assert timings.accelerator is not None
        roof = timings.accelerator.attainable(intensity(SIG, L=fastest, **SHAPE))
        rows.append(
            [
                name,
                f"{fastest:,}",
                f"{rates[fastest] / 1e12:.0f} ({100 * rates[fastest] / roof:.0f} %)",
                f"{largest:,}",
                f"{rates[largest] / 1e12:.0f}",
                f"{curve[largest] / curve[fastest]:.1f}",
            ]
        )
    header = [
        "kernel", "fastest chunk", "TFLOP/s (share of the roofline)", "largest chunk", "TFLOP/s",
        "time over that of the fastest chunk",
    ]  # fmt: skip
    return {"where": timings.where, "table": Table(header, rows)} if rows else {"missing": _missing(SUITE)}


def _time_bounds(config: Options) -> Values:
    """Compare the measured times with the bounds by counted FLOPs and bytes."""
    result = next((r for r in load(config.results, complete=True).values() if r["suite"] == BOUNDS_SUITE), None)
    rows = [r for r in compare_with_bounds(result) if r["x"] == LENGTH] if result is not None else []
    by_name: dict[str, list[str]] = {}
    for r in rows:
        if "," not in r["name"] or r["name"].endswith(" tfla"):
            by_name.setdefault(r["name"], []).append(f"{r['measured / overlapped']:.2f}")
    table = Table(
        ["implementation", "forward", "forward + backward"],
        [[name, *ratios, *["-"] * (2 - len(ratios))] for name, ratios in by_name.items()],
    )
    if result is None or not by_name:
        return {"missing": _missing(BOUNDS_SUITE)}
    env = result["environment"]
    return {"T": f"{LENGTH:,}", "where": f"{env['device']}, {env['date']}", "table": table}


def claims(config: Options) -> list[Claim]:
    """Return the claims about the theory of the runtime with the numbers of counts and stored results."""
    timings = sig_forward(config)
    return fill(
        {
            "bound_by": _bound_by(),
            "optimum_grows": _optimum_grows(),
            "newer_hardware": _newer_hardware(),
            "measured_optimum": _measured_optimum(timings),
            "flop_rate": _flop_rate(timings),
            "time_bounds": _time_bounds(config),
        }
    )
