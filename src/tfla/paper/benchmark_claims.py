"""The values of the claims about runtime and memory (Section 5.2, appendix E.3), from stored measurements."""

from __future__ import annotations

from typing import Any

from tfla.bench.gpu_report import milliseconds
from tfla.bench.stored import load
from tfla.measure.problem import BOTH, FORWARD
from tfla.paper.claims_template import Values, fill
from tfla.paper.report_types import Claim, Options, Table

EXP_LIMIT, EXP_XL = "mlstm_kernels mLSTMexp limit_chunk 64", "mlstm_kernels mLSTMexp xl_chunk 128"
SIG_XL, SIG_XL_256 = "mlstm_kernels mLSTMsig xl_chunk 128", "mlstm_kernels mLSTMsig xl_chunk 256"
OWN_SIG, OWN_EXP = "tfla mLSTMsig", "tfla mLSTMexp"
PAPER_SIG, PAPER_EXP = "tfla mLSTMsig, triton tfla", "tfla mLSTMexp, triton tfla"
ATTENTION, MAMBA = "attention, cuDNN", "Mamba-2"
SIMPLE_GLA, LIGHTNING = "fla simple_gla chunk", "fla lightning"
Measurements = dict[tuple[str, str, int], float]


class SuiteResult:
    """The stored result of one suite: seconds and bytes by implementation, direction and place on the axis."""

    def __init__(self, results: dict[str, dict[str, Any]], suite: str, group: str | None = None) -> None:
        self.suite = suite
        result = next((r for r in results.values() if r["suite"] == suite), None)
        rows = [r for r in result["rows"] if "x" in r and group in (None, r.get("group"))] if result else []
        rows += [
            r | {"name": f"{r['name']}, {r['implementation']}"}
            for r in rows
            if "implementation" in r and "," not in r["name"]
        ]
        self.device = result["environment"]["device"] if result else ""
        self.has_rows = bool(rows)
        self.has_baselines = any(not r["name"].startswith("tfla") for r in rows)
        self.seconds: Measurements = {(r["name"], r["direction"], r["x"]): r["seconds"] for r in rows if "seconds" in r}
        self.bytes: Measurements = {
            (r["name"], r["direction"], r["x"]): r["peak_bytes"] for r in rows if r.get("peak_bytes") is not None
        }
        self.errors = {(r["name"], r["direction"]): r["error"] for r in rows if "error" in r}

    def curve(self, name: str, direction: str, measurements: Measurements | None = None) -> dict[int, float]:
        """Return what was measured of an implementation by its place on the axis; None stands for seconds."""
        found = self.seconds if measurements is None else measurements
        return {
            x: y for (n, d, x), y in sorted(found.items(), key=lambda item: item[0][2]) if (n, d) == (name, direction)
        }

    def ratios(
        self, slow: str, fast: str, direction: str, measurements: Measurements | None = None
    ) -> dict[int, float]:
        """Return, by place on the axis, how many times as much the first implementation takes as the second."""
        above, below = (self.curve(name, direction, measurements) for name in (slow, fast))
        return {x: y / below[x] for x, y in above.items() if x in below}

    def span(self, slow: str, fast: str, direction: str, measurements: Measurements | None = None) -> str | None:
        """Return the smallest and the largest ratio over the axis as text; None where there is no ratio."""
        found = self.ratios(slow, fast, direction, measurements)
        if not found:
            return None
        low, high = (f"{pick(found.values()):.2f}" for pick in (min, max))
        return low if low == high else f"{low} to {high}"

    def time_and_memory(self, key: str, slow: str, fast: str, direction: str) -> Values:
        """Return the ratios of seconds as the value ``key``, and those of bytes as ``key``_memory; see :meth:`span`."""
        return {
            key: self.span(slow, fast, direction),
            f"{key}_memory": self.span(slow, fast, direction, self.bytes),
        }

    def error(self, slow: str, fast: str, direction: str) -> str | None:
        """Return the type of the error of either implementation; None where both were timed or neither was run."""
        if self.ratios(slow, fast, direction):
            return None
        found = self.errors.get((slow, direction)) or self.errors.get((fast, direction))
        return found.partition(":")[0] if found else None

    def timed(self, *names: str) -> bool:
        """Return whether all of these implementations were timed."""
        return {name for name, _, _ in self.seconds}.issuperset(names)

    def missing(self) -> dict[str, str]:
        """Return the sentence that stands in place of a claim's findings, as its only value."""
        if self.has_rows:
            why = f"`benchmarks/results/` has {self.suite} without the implementations that this compares."
        else:
            why = f"there is no `benchmarks/results/{self.suite}.json`."
        return {"missing": f"This was not measured: {why}"}


def _limit_and_xl(t: SuiteResult) -> Values:
    """Compare limit_chunk of mlstm_kernels with its xl_chunk."""
    if not t.timed(EXP_LIMIT, EXP_XL):
        return t.missing()
    return {
        "device": t.device,
        "forward": t.span(EXP_LIMIT, EXP_XL, FORWARD),
        "both": t.span(EXP_LIMIT, EXP_XL, BOTH),
        "both_error": t.error(EXP_LIMIT, EXP_XL, BOTH),
    }


def _sigmoid_gate(t: SuiteResult) -> Values:
    """Compare mLSTMexp with mLSTMsig, by the kernels of mlstm_kernels, by ours of the paper, and by the fused ones."""
    if not t.has_rows:
        return t.missing()
    return {
        "authors": t.span(EXP_XL, SIG_XL, FORWARD),
        "tfla": t.span(PAPER_EXP, PAPER_SIG, FORWARD),
        "fused": t.span(OWN_EXP, OWN_SIG, FORWARD),
    }


def _attention(t: SuiteResult) -> Values:
    """Compare causal attention with the mLSTM: from which length on it is slower, and by how much at the longest."""
    rows = []
    for name in (SIG_XL, OWN_SIG, OWN_EXP):
        found = t.ratios(ATTENTION, name, BOTH)
        slower = [x for x, ratio in found.items() if ratio <= 1]
        faster = [x for x in found if x > max(slower, default=0)]
        if found:
            longest = max(found)
            rows.append([name, f"{faster[0]:,}" if faster else "-", f"{longest:,}", f"{found[longest]:.0f}"])
    if not rows:
        return t.missing()
    header = ["implementation", "faster than attention from T", "longest T", "times as fast there"]
    return {
        "device": t.device,
        "flash_attention": t.timed("attention, FlashAttention-3"),
        "table": Table(header, rows),
    }


def _mamba(t: SuiteResult) -> Values:
    """Compare Mamba-2 with the mLSTM."""
    if not t.timed(MAMBA):
        return {"missing": "This was not measured: `mamba_ssm` was not installed."} if t.has_rows else t.missing()
    names = {"authors": SIG_XL, "sig": OWN_SIG, "exp": OWN_EXP}
    return {"device": t.device, **{key: t.span(MAMBA, name, BOTH) for key, name in names.items()}}


def _trade_off(t: SuiteResult) -> Values:
    """Return time and memory at the fastest, the smallest and the largest chunk size of the paper's kernels."""
    times, memory = t.curve(PAPER_SIG, BOTH), t.curve(PAPER_SIG, BOTH, t.bytes)
    if not times or not set(times) <= set(memory):
        return t.missing()
    best, low, high = min(times, key=lambda x: times[x]), min(times), max(times)
    own = t.curve(OWN_SIG, BOTH)
    return {
        **{name: f"{x:,}" for name, x in (("best", best), ("low", low), ("high", high))},
        **{f"{name}_ms": f"{times[x] * 1e3:.1f}" for name, x in (("best", best), ("low", low), ("high", high))},
        **{f"{name}_gib": f"{memory[x] / 2**30:.1f}" for name, x in (("low", low), ("high", high))},
        **{f"own_{name}_ms": f"{own[x] * 1e3:.1f}" if x in own else None for name, x in (("low", low), ("high", high))},
    }


def _simple_gla(t: SuiteResult) -> Values:
    """Compare simple GLA of flash-linear-attention with mLSTMsig."""
    if not t.timed(SIMPLE_GLA, SIG_XL_256):
        return t.missing()
    return {
        **t.time_and_memory("forward", SIMPLE_GLA, SIG_XL_256, FORWARD),
        "both": t.span(SIMPLE_GLA, SIG_XL_256, BOTH),
        "both_error": t.error(SIMPLE_GLA, SIG_XL_256, BOTH),
        **t.time_and_memory("own", SIMPLE_GLA, OWN_SIG, FORWARD),
    }


def _lightning(t: SuiteResult) -> Values:
    """Compare Lightning Attention of flash-linear-attention with mLSTMsig."""
    if not t.timed(LIGHTNING, SIG_XL_256):
        return t.missing()
    return {
        **t.time_and_memory("both", LIGHTNING, SIG_XL_256, BOTH),
        **t.time_and_memory("own_both", LIGHTNING, OWN_SIG, BOTH),
        **t.time_and_memory("forward", LIGHTNING, SIG_XL_256, FORWARD),
    }


def _head_dims(t: SuiteResult) -> Values:
    """Return the times by head dim."""
    if not t.has_baselines:
        return t.missing()
    curves = {name: t.curve(name, BOTH) for name in (EXP_LIMIT, EXP_XL, SIG_XL, OWN_SIG, OWN_EXP)}
    dims = sorted({x for curve in curves.values() for x in curve})
    rows = [
        [name, *(milliseconds(curve[x]) if x in curve else "-" for x in dims)]
        for name, curve in curves.items()
        if curve
    ]
    return {"device": t.device, "table": Table(["implementation", *map(str, dims)], rows)}


def claims(config: Options) -> list[Claim]:
    """Return the claims about runtime and memory with the numbers of the stored results."""
    results = load(config.results)
    fig4 = SuiteResult(results, "fig4")
    return fill(
        {
            "limit_and_xl": _limit_and_xl(fig4),
            "sigmoid_gate": _sigmoid_gate(fig4),
            "attention": _attention(fig4),
            "mamba": _mamba(fig4),
            "trade_off": _trade_off(SuiteResult(results, "fig5")),
            "simple_gla": _simple_gla(SuiteResult(results, "fig12")),
            "lightning": _lightning(SuiteResult(results, "fig13", "32 × 128")),
            "head_dims": _head_dims(SuiteResult(results, "fig14")),
        }
    )
