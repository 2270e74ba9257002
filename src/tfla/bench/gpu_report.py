"""The sections of docs/performance.md from stored results of `tfla bench gpu`."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import Any

from tfla._util.markdown import table
from tfla.bench.gpu import NOT_RUN
from tfla.bench.options import GpuBench

Row = dict[str, Any]
# The name of each row of rooflines, and a pattern of the implementations that it bounds.
ROOFLINES = {
    "roofline of mLSTMsig": re.compile("tfla mLSTMsig"),
    "roofline of mLSTMexp": re.compile("tfla mLSTMexp"),
    "roofline": re.compile("tfla(, packed)?$"),
}
STREAMS = {
    "seconds": "whole", "computing": "computes", "sending": "sends", "exposed": "sends without computing",
    "idle": "does neither",
}  # fmt: skip
FIRST_CALLS = "forward", "forward + backward", "a step"  # of `tfla.warmup`, in its order
REFUSES = "cannot run these inputs"  # part of the message of a kernel that does not support the sizes
# With this attribute MkDocs parses the folded text as Markdown, as GitHub always does.
FOLDED = '<details markdown="1"><summary>Tables, conditions and the command</summary>'
METHOD = """## On GPUs

The setups of the paper's benchmark figures. Times are GPU times: medians of samples with a rest before each, and where
a table says sustained, the mean of a run back to back, under which the card lowers its clock. In brackets the ratio to
the form's roofline: the longer of its bytes at the rate of a device copy and its FLOPs at the rate of a large matrix
product, both measured in the same run. Every implementation ran in a process of its own on fresh random inputs, with
q, k and v in bfloat16. Memory is the allocator's peak beyond the inputs; outputs and gradients count. Minimum, maximum
and number of the samples are in the files."""


class Notes:
    """The footnotes of a section; equal texts share a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """Add a footnote unless it is there, and return the reference to it."""
        if text not in self.texts:
            self.texts.append(text)
        return f"failed [{self.texts.index(text) + 1}]"

    def lines(self) -> str:
        """Return the footnotes as a numbered list."""
        return "\n".join(f"{n}. {text.replace('|', '/')}" for n, text in enumerate(self.texts, 1))


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with at least three digits."""
    digits = next(n for n, least in ((1, 0.1), (2, 1e-2), (3, 1e-4), (4, 0)) if seconds >= least)
    return f"{seconds * 1e3:,.{digits}f}"


def time_cell(row: Row | None, key: str, bound: str, notes: Notes) -> str:
    """Return milliseconds with the ratio to the roofline in brackets, and a star where there are few samples."""
    if row is None:
        return "-"
    if "error" in row:
        return "not run" if row["error"] == NOT_RUN else notes.mark(row["error"])
    if key not in row:
        return "-"
    few = "\\*" if key == "seconds" and row["samples"] < row["asked"] else ""
    times = f" ({row[key] / row[bound]:.2f} ×)" if bound in row else ""
    return milliseconds(row[key]) + few + times


def _names(rows: list[Row]) -> list[str]:
    """Return the names in the rows, each once, in their order."""
    return list(dict.fromkeys(r["name"] for r in rows))


def _time_tables(rows: list[Row], axis: str, notes: Notes) -> list[str]:
    """Return a table of times for each direction, and one of sustained times where there are any."""
    parts = []
    for direction in dict.fromkeys(r["direction"] for r in rows):
        for key, bound, how in (
            ("seconds", "floor_seconds", "ms"),
            ("sustained_seconds", "sustained_floor_seconds", "ms, sustained"),
        ):
            selected = [r for r in rows if r["direction"] == direction]
            if not any(key in r for r in selected):
                continue
            xs = sorted({r["x"] for r in selected if key in r or (key == "seconds" and "error" in r)})
            found = {(r["name"], r["x"]): r for r in selected}
            body = [[n, *(time_cell(found.get((n, x)), key, bound, notes) for x in xs)] for n in _names(selected)]
            for label, name in ROOFLINES.items():
                bounds = {r["x"]: r[bound] for r in selected if name.match(r["name"]) and bound in r}
                if bounds:
                    body.append([label, *(milliseconds(bounds[x]) if x in bounds else "-" for x in xs)])
            parts.append(table([f"{direction}, {how}, by {axis}", *(f"{x:,}" for x in xs)], body))
    return parts


def _other_tables(rows: list[Row], axis: str) -> list[str]:
    """Return the tables of other measurements of the last direction.

    These are memory, stored states where the chunk size is the axis, tokens per second, the operator's share of
    training steps, and first calls.
    """
    *_, direction = dict.fromkeys(r["direction"] for r in rows)
    parts, xs = [], list[int]()
    peaks = [r["peak_bytes"] for r in rows if r["direction"] == direction and "peak_bytes" in r]
    memory = "GiB" if max(peaks, default=0) >= 2**30 / 10 else "MiB"
    for key, title, digits, unit in (
        ("peak_bytes", f"peak memory, {direction}, {memory}", 2, 2**30 if memory == "GiB" else 2**20),
        ("allocated_bytes", "most memory of a GPU, weights and the optimizer's states included, GiB", 1, 2**30),
        ("state_bytes", "stored states, GiB", 2, 2**30),
        ("tokens_per_second", "tokens per second, thousands", 1, 1e3),
        ("operator_share", "operator, % of the step", 1, 0.01),
    ):
        selected = [r for r in rows if r["direction"] == direction and key in r]
        if not any(r[key] for r in selected) or (key == "state_bytes" and axis != "chunk size"):
            continue  # replays of a CUDA graph allocate nothing
        xs = sorted({r["x"] for r in selected})
        cells = {(r["name"], r["x"]): f"{r[key] / unit:,.{digits}f}" for r in selected}
        body = [[n, *(cells.get((n, x), "-") for x in xs)] for n in _names(selected)]
        parts.append(table([f"{title}, by {axis}", *(f"{x:,}" for x in xs)], body))
    compiled = {r["name"]: r["first_calls"] for r in rows if r.get("first_calls")}
    body = [[name, *(f"{c['seconds']:.1f} ({c['kernels']})" for c in calls)] for name, calls in compiled.items()]
    if body:
        parts.append(table(["first call, s (kernels)", *FIRST_CALLS], body))
    profiled = [r for r in rows if "streams" in r]
    body = [[r["name"], f"{r['x']:,}", *(milliseconds(r["streams"][key]) for key in STREAMS)] for r in profiled]
    if body:
        parts.append(table(["one step by streams, ms", axis, *STREAMS.values()], body))
    rates = {(r["name"], r["x"]): r["tokens_per_second"] for r in rows if "tokens_per_second" in r}
    one = next((r["name"] for r in rows if r.get("processes", 1) == 1), "")

    def ratio(name: str, x: int) -> str:
        """Return the cell of the speedup over one GPU."""
        both = (name, x) in rates and (one, x) in rates
        return f"{rates[name, x] / rates[one, x]:.2f}" if both else "-"

    together = list(dict.fromkeys(r["name"] for r in rows if r.get("processes", 1) > 1))
    body = [[name, *(ratio(name, x) for x in xs)] for name in together]
    if body and rates:
        parts.append(table([f"tokens per second, times those of one GPU, by {axis}", *(f"{x:,}" for x in xs)], body))
    return parts


def _speedups(rows: list[Row], axis: str) -> list[str]:
    """Return a table for each direction of the speedups of several GPUs over one on the same problem."""
    parts = []
    timed = [r for r in rows if "seconds" in r and "tokens_per_second" not in r]
    for direction in dict.fromkeys(r["direction"] for r in timed):
        selected = [r for r in timed if r["direction"] == direction]
        together = [r for r in selected if r.get("processes", 1) > 1]
        # The implementation on one GPU has the same name up to the comma.
        alone = {(r["name"].partition(",")[0], r["x"]): r["seconds"] for r in selected if r.get("processes", 1) == 1}
        found = {
            (r["name"], r["x"]): f"{one / r['seconds']:.2f}"
            for r in together
            if (one := alone.get((r["name"].partition(",")[0], r["x"]))) is not None
        }
        xs = sorted({x for _, x in found})
        body = [[name, *(found.get((name, x), "-") for x in xs)] for name in _names(together)]
        if found:
            parts.append(table([f"{direction}, times as fast as one GPU, by {axis}", *(f"{x:,}" for x in xs)], body))
    return parts


def command(config: dict[str, Any], stem: str) -> str:
    """Return the command that repeats the run, with the options that differ from the defaults."""
    words = ["tfla", "bench", "gpu", config["suite"]]
    for option in fields(GpuBench):
        if option.name in ("suite", "out") or option.name not in config:
            continue
        value = tuple(config[option.name]) if isinstance(option.default, tuple) else config[option.name]
        name = f"--{option.name.replace('_', '-')}"
        if value == option.default:
            continue
        if isinstance(value, bool):
            words.append("--no-baselines" if option.name == "baselines" else name)
        else:
            words += [name, *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join([*words, "--out", f"benchmarks/results/{stem}.json"])


def _conditions(result: dict[str, Any]) -> str:
    """Return the sentence on device, versions, sampling and rates of a run."""
    env, rates, config = result["environment"], result["rates"], result["config"]
    where = [env["device"], *(f"{key} {env[key]}" for key in ("driver", "cuda", "cudnn") if env.get(key)), env["date"]]
    versions = ", ".join(f"{name} {number}" for name, number in env["versions"].items())
    copy, gemm = ({how: rate / 1e12 for how, rate in rates[name].items()} for name in ("copy", "gemm"))
    return (
        f"{', '.join(where)}; {versions}. {config['repeats']} samples after {config['warmup']} calls, "
        f"{config['pause'] * 1e3:.0f} ms of rest before each; sustained for {config['sustained']:g} s. Device copy "
        f"{copy['rested']:.2f} TB/s, sustained {copy['sustained']:.2f}; matrix product {gemm['rested']:.0f} TFLOP/s, "
        f"sustained {gemm['sustained']:.0f}."
    )


def _default_kernels(rows: list[Row]) -> str:
    """Return which backend and kernel `backend=None` chose, and at which sizes if there are several."""
    picked: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if "implementation" in row and "," not in row["name"]:
            xs = picked.setdefault(row["name"], {}).setdefault(row["implementation"], [])
            xs += [row["x"]] if row["x"] not in xs else []
    said = []
    for name, kernels in picked.items():
        at = {k: f" at {', '.join(f'{x:,}' for x in xs)}" if len(kernels) > 1 else "" for k, xs in kernels.items()}
        said.append(f"{name} is {' and '.join(f'{kernel}{where}' for kernel, where in at.items())}")
    return "; ".join(said)


def _unsupported(rows: list[Row]) -> list[str]:
    """Return the kernels of this library that support none of these sizes."""
    selected = [name for name in _names(rows) if name.startswith("tfla")]
    return [n for n in selected if all(REFUSES in r.get("error", "") for r in rows if r["name"] == n)]


def _left_out(rows: list[Row]) -> list[str]:
    """Return the implementations for which no time was left."""
    return [n for n in _names(rows) if all(r.get("error") == NOT_RUN for r in rows if r["name"] == n)]


def section(result: dict[str, Any], image: str | None) -> str:
    """Return the section of one result of :mod:`.stored`.

    Heading and figure are always visible; conditions, tables, errors and commands are folded. The name of the result is
    its anchor.
    """
    runs = result["runs"]
    parts = [f'<a id="{next(iter(runs))}"></a>', f"### {result['title']}"]
    parts += [result["note"]] if "note" in result else []
    if image is not None:
        parts.append(f"![{result['title']}]({image})")
    parts.append(FOLDED)
    for run in runs.values():
        only = ", ".join(run["config"].get("only", ())) if len(runs) > 1 else ""
        parts.append((f"{only}: " if only else "") + _conditions(run))
    rows = [r for r in result["rows"] if "x" in r]
    notes, remarks = Notes(), list[str]()
    for group in dict.fromkeys(r.get("group", "") for r in rows):
        selected = [r for r in rows if r.get("group", "") == group]
        refused = _unsupported(selected)
        left_out = _left_out(selected)
        selected = [r for r in selected if r["name"] not in (*refused, *left_out)]
        title = f" ({group})" if group else ""
        remarks += [f"Not for these sizes{title}: {'; '.join(refused)}."] if refused else []
        remarks += [f"Not run, no time being left{title}: {'; '.join(left_out)}."] if left_out else []
        remarks += [f"By default{title} {kernels}."] if (kernels := _default_kernels(selected)) else []
        if selected:
            parts += [f"#### {group}"] if group else []
            parts += _time_tables(selected, result["axis"], notes)
            parts += _speedups(selected, result["axis"])
            parts += _other_tables(selected, result["axis"])
    if any("samples" in r and r["samples"] < r["asked"] for r in rows):
        remarks.append("\\* fewer samples, at least 5: one takes long.")
    absent = [r["name"] for r in result["rows"] if "x" not in r]
    if absent:
        remarks.append(f"Not installed there: {', '.join(dict.fromkeys(absent))}.")
    parts += [" ".join(remarks)] if remarks else []
    parts += [notes.lines()] if notes.texts else []
    commands = "`, `".join(command(run["config"], stem) for stem, run in runs.items())
    parts += [f"Reproduce: `{commands}`.", "</details>"]
    return "\n\n".join(parts)
