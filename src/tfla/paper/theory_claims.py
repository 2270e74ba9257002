"""What the paper claims about the runtime in theory (appendix G)."""

from __future__ import annotations

import math

from tfla.bench.stored import load
from tfla.measure.accelerators import ACCELERATORS
from tfla.paper.algorithms.optimum import runtime_optimal_chunk
from tfla.paper.chunk_timings import BATCH, SHAPE, SUITE, TILE, ChunkTimings, H, sig_forward
from tfla.paper.report_types import Claim, Options
from tfla.paper.runtime import SIG, intensity
from tfla.paper.time_bounds import AT, compared
from tfla.paper.time_bounds import SUITE as EXPLAINED

COMMAND = "tfla analyze theory"


def best(dhv: float, flop_per_byte: float) -> float:
    return float(runtime_optimal_chunk(dhv, 0.5, flop_per_byte))


def _grows() -> Claim:
    by_width = math.log(best(1024, 295) / best(256, 295)) / math.log(4)
    by_intensity = math.log(best(512, 400) / best(512, 100)) / math.log(4)
    return Claim(
        "The runtime-optimal chunk grows with head dim and accelerator",
        "that it grows with the square roots of dhv and of the accelerator's FLOP/byte (121), (Figures 21, 22).",
        f"it holds: powers of {by_width:.2f} (from dhv 256 to 1,024) and {by_intensity:.2f} (from 100 to 400 "
        "FLOP/byte).",
        COMMAND,
    )


def _newer() -> Claim:
    chunks = ", ".join(f"{name} {best(512, a.intensity):.0f}" for name, a in ACCELERATORS.items())
    return Claim(
        "Newer hardware needs larger chunks",
        "that newer generations require larger chunks to reach peak performance (Section G.5).",
        f"from the V100 to the H100, not beyond: with dhv 512 and float32 states {chunks}. The H200 has the H100's "
        "arithmetic and faster memory, the B200 more of both in the same ratio.",
        COMMAND,
    )


def _bound() -> Claim:
    def crossing(name: str) -> str:
        roof = ACCELERATORS[name].intensity
        return f"{next(L for L in range(16, 8192) if intensity(SIG, L=L, **SHAPE) > roof):,} steps on an {name}"

    return Claim(
        "The chunk size decides between memory-bound and compute-bound",
        "that intensity grows with the chunk, and that small chunks are memory-bound and large ones compute-bound "
        "(Figures 18, 19).",
        "by counting it holds: with dqk 256, dhv 512 and float32 states the forward of mLSTMsig is compute-bound from "
        f"chunks of {crossing('A100')}, {crossing('H100')}, {crossing('H200')}.",
        COMMAND,
    )


def _no_points() -> str:
    return f"not measured: there is no `benchmarks/results/{SUITE}.json`."


def _optimum(points: ChunkTimings) -> Claim:
    gpu = "H200" if "H200" in points.where else "H100"
    found = []
    for name, curve in points.papers.items():
        several = {x: t for x, t in curve.items() if x > TILE}
        if several:
            at = min(several, key=lambda x: several[x])
            found.append(f"{name}: {at} among chunks of several tiles ({several[at] * 1e3:.2f} ms forward)")
        if curve.get(TILE, math.inf) < min(several.values(), default=math.inf):
            found[-1] += f", one tile a chunk is faster still ({curve[TILE] * 1e3:.2f} ms)"
    theory = f"theory {best(512, ACCELERATORS[gpu].intensity):.0f} on an {gpu}"
    text = f"{theory}; measured ({points.where}) {'; '.join(found)}."
    return Claim(
        "The measured optimum lies below the theory's",
        "that mLSTMsig's forward is fastest near chunks of 256 on an H100, less than in theory, where the optimum is "
        f"{best(512, ACCELERATORS['H100'].intensity):.0f} by (121) (Figures 17, 21; 8 heads, dqk 256, dhv 512).",
        text if found else _no_points(),
        COMMAND,
    )


def _roof(points: ChunkTimings) -> Claim:
    reached = []
    for name, curve in points.papers.items():
        fastest, largest = min(curve, key=lambda x: curve[x]), max(curve)
        rates = {L: float(SIG.flops(L=L, **SHAPE)) * BATCH * H / curve[L] for L in (fastest, largest)}
        assert points.accelerator is not None
        roof = points.accelerator.attainable(intensity(SIG, L=fastest, **SHAPE))
        reached.append(
            f"{name}: {rates[fastest] / 1e12:.0f} TFLOP/s, {100 * rates[fastest] / roof:.0f} % of what the roof "
            "allows, "
            f"at its fastest chunk, {fastest}; {rates[largest] / 1e12:.0f} TFLOP/s at {largest:,}, where it takes "
            f"{curve[largest] / curve[fastest]:.1f} times as long"
        )
    return Claim(
        "FLOP/s are not what to choose a chunk size by",
        "that kernels are far from the roofline, and that FLOP/s go on rising with the chunk where the runtime has its "
        "minimum (Figures 19, 20).",
        f"for kernels of the paper's kind, under the roof of rates measured in the same run: {'; '.join(reached)}."
        if reached
        else _no_points(),
        COMMAND,
    )


def _explained(config: Options) -> Claim:
    result = next((r for r in load(config.results, complete=True).values() if r["suite"] == EXPLAINED), None)
    rows = [r for r in compared(result) if r["x"] == AT] if result is not None else []
    by_name: dict[str, list[str]] = {}
    for r in rows:
        if "," not in r["name"] or r["name"].endswith(" tfla"):
            by_name.setdefault(r["name"], []).append(f"{r['measured / overlapped']:.2f}")
    texts = [f"{name} {' and '.join(times)}" for name, times in by_name.items()]
    return Claim(
        "Theory and measurement",
        "that measured runtimes are above the theory's and follow its trend (Section G.1, Figure 17).",
        f"measured times, forward and forward + backward, in multiples of what the form's counted FLOPs and bytes take "
        f"where they overlap (114), at rates measured in the same run (Figure 4's setup, T {AT:,}): {'; '.join(texts)}."
        if texts
        else f"not measured: there is no `benchmarks/results/{EXPLAINED}.json`.",
        COMMAND,
    )


def claims(config: Options) -> list[Claim]:
    points = sig_forward(config)
    return [_bound(), _grows(), _newer(), _optimum(points), _roof(points), _explained(config)]
