"""What the paper claims about runtime and memory (Section 5.2, appendix E.3), beside stored measurements."""

from __future__ import annotations

from typing import Any

from tfla.bench.gpu_report import milliseconds
from tfla.bench.stored import load
from tfla.measure.problem import BOTH, FORWARD
from tfla.paper.report_types import Claim, Options

EXP_LIMIT, EXP_XL = "mlstm_kernels mLSTMexp limit_chunk 64", "mlstm_kernels mLSTMexp xl_chunk 128"
SIG_XL, SIG_XL_256 = "mlstm_kernels mLSTMsig xl_chunk 128", "mlstm_kernels mLSTMsig xl_chunk 256"
OWN_SIG, OWN_EXP = "tfla mLSTMsig", "tfla mLSTMexp"
ATTENTION, MAMBA = "attention, cuDNN", "Mamba-2"
Table = dict[tuple[str, str, int], float]


class Stored:
    """Stored results of one suite: seconds and bytes by contender, direction and place on the axis."""

    def __init__(self, results: dict[str, dict[str, Any]], suite: str, group: str | None = None) -> None:
        self.suite = suite
        result = next((r for r in results.values() if r["suite"] == suite), None)
        rows = [r for r in result["rows"] if "x" in r and group in (None, r.get("group"))] if result else []
        rows += [r | {"name": f"{r['name']}, {r['way']}"} for r in rows if "way" in r and "," not in r["name"]]
        self.there = bool(rows)
        self.beside_others = any(not r["name"].startswith("tfla") for r in rows)
        self.seconds: Table = {(r["name"], r["direction"], r["x"]): r["seconds"] for r in rows if "seconds" in r}
        self.bytes: Table = {(r["name"], r["direction"], r["x"]): r["peak_bytes"] for r in rows if "peak_bytes" in r}
        self.errors = {(r["name"], r["direction"]): r["error"] for r in rows if "error" in r}

    def ratios(self, slow: str, fast: str, direction: str, of: str = "seconds") -> dict[int, float]:
        """By place on the axis, how many times the second the first one takes."""
        table: Table = getattr(self, of)
        return {
            x: y / table[fast, way, x]
            for (name, way, x), y in sorted(table.items(), key=lambda item: item[0][2])
            if name == slow and way == direction and (fast, way, x) in table
        }

    def span(self, slow: str, fast: str, direction: str, of: str = "seconds") -> str:
        """As text: what the ratio is over the axis, or why there is none."""
        found = self.ratios(slow, fast, direction, of)
        if not found:
            why = self.errors.get((slow, direction)) or self.errors.get((fast, direction))
            failed = f": {why.partition(':')[0]} there" if why else ""
            return f"not measured for {slow} and {fast}, {direction}{failed}"
        low, high = min(found.values()), max(found.values())
        return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"

    def has(self, *names: str) -> bool:
        """Whether all of these were timed."""
        return {name for name, _, _ in self.seconds}.issuperset(names)

    def absent(self) -> str:
        if self.there:
            return f"not measured beside other libraries: `benchmarks/results/` has {self.suite} without them."
        return f"not measured: there is no `benchmarks/results/{self.suite}.json`."


def measure(suite: str) -> str:
    return f"tfla bench gpu {suite} --out benchmarks/results/{suite}.json"


def _limit_and_xl(t: Stored) -> Claim:
    return Claim(
        "Two levels of sequence parallelism",
        "that mLSTMexp's xl_chunk kernels are about 25 % faster than limit_chunk (Figure 4).",
        f"on an H200 limit_chunk takes {t.span(EXP_LIMIT, EXP_XL, FORWARD)} times as long as xl_chunk forward and "
        f"{t.span(EXP_LIMIT, EXP_XL, BOTH)} times forward and backward, over all T; both are mlstm_kernels' own."
        if t.there
        else t.absent(),
        measure(t.suite),
    )


def _sigmoid(t: Stored) -> Claim:
    return Claim(
        "mLSTMsig is faster forward",
        "that the sigmoid input gate is another 30 % and more faster forward (Figure 4), through fused loops and fewer "
        "operations.",
        f"mLSTMexp takes {t.span(EXP_XL, SIG_XL, FORWARD)} times as long in mlstm_kernels (chunks of 128), "
        f"{t.span('tfla mLSTMexp, triton tfla', 'tfla mLSTMsig, triton tfla', FORWARD)} times in this library's "
        "kernels "
        f"of the paper's kind and {t.span(OWN_EXP, OWN_SIG, FORWARD)} times in its walks. Here the max state is "
        "computed "
        "before the large kernels, so the exponential gate needs no loop of its own."
        if t.there
        else t.absent(),
        measure(t.suite),
    )


def _attention(t: Stored) -> Claim:
    def first(name: str) -> str:
        """From where on it is the faster one."""
        found = t.ratios(ATTENTION, name, BOTH)
        slower = [x for x, ratio in found.items() if ratio <= 1]
        after = [x for x in found if x > max(slower, default=0)]
        return f"{name} from T = {after[0]:,} on ({found[max(found)]:.0f} times at {max(found):,})" if after else name

    return Claim(
        "Faster than attention in training",
        "that its kernels are faster than FlashAttention-3 for longer sequences (Figure 4).",
        "FlashAttention-3 was not installed where this was measured; beside cuDNN's causal attention of torch, forward "
        f"and backward: {first(SIG_XL)}; {first(OWN_SIG)}; {first(OWN_EXP)}."
        if t.there
        else t.absent(),
        measure(t.suite),
    )


def _mamba(t: Stored) -> Claim:
    texts = (f"{t.span(MAMBA, name, BOTH)} times as long as {name}" for name in (SIG_XL, OWN_SIG, OWN_EXP))
    return Claim(
        "More than twice as fast as Mamba-2 in training",
        "that Mamba-2 takes more than twice as long forward and backward at all lengths (Figure 4).",
        f"Mamba-2 (64 heads of 64, state 128, 8 groups) takes {', '.join(texts)}, over all T."
        if t.has(MAMBA)
        else "not measured: `mamba_ssm` was not installed.",
        measure(t.suite),
    )


def _trade_off(t: Stored) -> Claim:
    name = "tfla mLSTMsig, triton tfla"
    times = {x: y for (n, way, x), y in t.seconds.items() if n == name and way == BOTH}
    memory = {x: y for (n, way, x), y in t.bytes.items() if n == name and way == BOTH}
    text = t.absent()
    if times and memory:
        best, low, high = min(times, key=lambda x: times[x]), min(times), max(times)
        text = (
            f"kernels of the paper's kind in this library: fastest with chunks of {best:,} "
            f"({times[best] * 1e3:.1f} ms; "
            f"{times[low] * 1e3:.1f} with {low:,}, {times[high] * 1e3:.1f} with {high:,}), while memory falls from "
            f"{memory[low] / 2**30:.1f} to {memory[high] / 2**30:.1f} GiB."
        )
        own = [t.seconds.get((OWN_SIG, BOTH, x)) for x in (low, high)]
        if own[0] is not None and own[1] is not None:
            text += (
                f" By default {OWN_SIG} takes {own[0] * 1e3:.1f} ms with {low:,} and {own[1] * 1e3:.1f} with {high:,}."
            )
    return Claim(
        "Chunk size trades runtime for memory",
        "that larger chunks save memory and, beyond an optimum, cost time (Figure 5).",
        text,
        measure(t.suite),
    )


def _gla(t: Stored) -> Claim:
    fla = "fla simple_gla chunk"
    others = " and ".join(
        f"{slow} takes {t.span(slow, fast, FORWARD)} times as long as {fast} forward, {t.span(slow, fast, BOTH)} times "
        f"forward and backward, with {t.span(slow, fast, BOTH, 'bytes')} times the memory"
        for slow, fast in ((SIG_XL, OWN_SIG), (EXP_XL, OWN_EXP))
        if t.has(slow, fast)
    )
    return Claim(
        "Simple GLA keeps up but needs twice the memory",
        "that only Simple GLA of flash-linear-attention is as fast in training (within 15 %), with almost twice the "
        "memory (Figure 12: 8 heads, dqk 256, dhv 512).",
        f"{fla} takes {t.span(fla, SIG_XL_256, FORWARD)} times as long as {SIG_XL_256} forward, with "
        f"{t.span(fla, SIG_XL_256, FORWARD, 'bytes')} times the memory; forward and backward "
        f"{t.span(fla, SIG_XL_256, BOTH)}. Beside {OWN_SIG}: {t.span(fla, OWN_SIG, FORWARD)} times as long "
        "forward, with "
        f"{t.span(fla, OWN_SIG, FORWARD, 'bytes')} times the memory."
        if t.has(fla, SIG_XL_256)
        else f"not measured: `benchmarks/results/` has fig12 without {fla}. {others or 'No other library is there'}."
        if t.beside_others
        else t.absent(),
        measure(t.suite),
    )


def _lightning(t: Stored) -> Claim:
    fla = "fla lightning"
    way = BOTH if t.ratios(fla, SIG_XL_256, BOTH) else FORWARD
    at = " and ".join(f"T {x:,}" for x in t.ratios(fla, SIG_XL_256, way))
    said = "forward and backward" if way == BOTH else f"forward ({at}; forward and backward were not measured)"
    return Claim(
        "Lightning Attention: least memory, three times the time",
        "that LightningAttention-2 needs the least memory and takes more than three times as long as mLSTMsig "
        "with chunks "
        "of 256, 32 heads of 128 (Figure 13).",
        f"flash-linear-attention's Lightning Attention, a chunkwise kernel with constant decay, takes "
        f"{t.span(fla, SIG_XL_256, way)} times as long as {SIG_XL_256} {said} with "
        f"{t.span(fla, SIG_XL_256, way, 'bytes')} times the memory, and {t.span(fla, OWN_SIG, way)} times as long as "
        f"{OWN_SIG} with {t.span(fla, OWN_SIG, way, 'bytes')} times the memory. The original kernels were not "
        "installed."
        if t.beside_others
        else t.absent(),
        measure(t.suite),
    )


def _head_dims(t: Stored) -> Claim:
    def at(name: str) -> str:
        found = {
            x: y for (n, way, x), y in sorted(t.seconds.items(), key=lambda i: i[0][2]) if (n, way) == (name, BOTH)
        }
        why = "did not run" if (name, BOTH) in t.errors else "was not measured"
        return f"{name} " + (", ".join(f"{milliseconds(y)} ({x})" for x, y in found.items()) or why)

    return Claim(
        "Fast over a wide range of head dims",
        "that runtimes are fast from head dim 32 to 1,024, with limit_chunk as fast as xl_chunk at 32 and 64 "
        "(Figure 14).",
        f"forward and backward, ms (head dim): {at(EXP_LIMIT)}; {at(EXP_XL)}; {at(SIG_XL)}; {at(OWN_SIG)}; "
        f"{at(OWN_EXP)}."
        if t.beside_others
        else t.absent(),
        measure(t.suite),
    )


def claims(config: Options) -> list[Claim]:
    results = load(config.results)
    fig4 = Stored(results, "fig4")
    return [
        _limit_and_xl(fig4),
        _sigmoid(fig4),
        _attention(fig4),
        _mamba(fig4),
        _trade_off(Stored(results, "fig5")),
        _gla(Stored(results, "fig12")),
        _lightning(Stored(results, "fig13", "32 × 128")),
        _head_dims(Stored(results, "fig14")),
    ]
