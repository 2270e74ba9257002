"""The marked tables of README.md and of pages in docs/, from stored results."""

from __future__ import annotations

import re
from typing import Any, get_args

from tfla._util.markdown import table
from tfla.bench.entries import VARIANTS
from tfla.bench.gpu import NOT_RUN
from tfla.bench.gpu_report import FIRST_CALLS, milliseconds
from tfla.bench.mixers import facts_of
from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH, FORWARD, STEP
from tfla.nn.config import Mixer

Row = dict[str, Any]
SPEED_ROWS = {
    "tfla mLSTMsig": "**tfla, mLSTMsig**",
    "tfla mLSTMexp": "**tfla, mLSTMexp**",
    "fla simple_gla chunk": "flash-linear-attention, `chunk_simple_gla`",
    "mlstm_kernels mLSTMsig xl_chunk 128": "mlstm_kernels, mLSTMsig, xl_chunk 128",
    "mlstm_kernels mLSTMexp xl_chunk 128": "mlstm_kernels, mLSTMexp, xl_chunk 128",
    "Mamba-2": "mamba_ssm, Mamba-2, 64 heads of 64, state 128, 8 groups",
    "attention, cuDNN": "causal attention, cuDNN, 32 heads of 128",
}
TRAINING_ROWS = {
    "tfla mLSTMsig": "mLSTMsig",
    "tfla mLSTMexp": "mLSTMexp",
    "Llama, 16 heads of 128, cuDNN": "Llama, cuDNN attention",
}
MAMBA_ROWS = {"tfla mamba_chunk_scan_combined": "tfla", "Mamba-2": "mamba_ssm"}
# Here a sample is calls back to back; in the rows above it is one call after a rest.
SPEED_JAX = {name: f"tfla, mLSTMexp, from {name}, calls back to back" for name in ("PyTorch", "JAX")}
SPEED_DELTA = ("Gated DeltaNet, 32 × 128 × 128", "KDA, 32 × 128 × 128")
DELTA_COLUMNS = {"fla": "flash-linear-attention", "tfla": "**tfla**"}
STEPS, BATCH = 8192, 5
MIXER_BATCHES = 1, 64
GPUS, SEQUENCES = ("1 GPU", "2 GPUs"), 2
OUT_OF_TIME = (NOT_RUN, "stopped after ")  # errors of rows that have no result because of the budget
MARK = re.compile(r"(<!-- table: (\w+) -->)\n(?:\|.*\n)*")


def _find(result: Row, name: str, x: int, direction: str) -> Row:
    """Return the row of an implementation, a size and a direction; empty where there is none."""
    rows = [r for r in result["rows"] if (r["name"], r.get("x"), r.get("direction")) == (name, x, direction)]
    return rows[0] if rows else {}


def _time(row: Row) -> str:
    """Return the cell of a time, with its ratio to the roofline."""
    if "seconds" not in row:
        return "-" if row.get("error", NOT_RUN).startswith(OUT_OF_TIME) else "fails"
    ratio = f" ({row['seconds'] / row['floor_seconds']:.2f} ×)" if "floor_seconds" in row else ""
    return milliseconds(row["seconds"]) + ratio


def _cells(forward: Row, both: Row) -> list[str]:
    """Return the cells of both directions' times, with ratios to the roofline, and of the memory in GiB."""
    return [_time(forward), _time(both), f"{both['peak_bytes'] / 2**30:.2f}" if both.get("peak_bytes") else "-"]


def speed(results: dict[str, Row]) -> str:
    """Return the table of Figure 4's setup at 8,192 steps: milliseconds, ratios to the roofline and memory in GiB.

    Rows of JAX and of the delta rule follow. Their labels name the GPU if it is another one.
    """
    body = []
    devices = {suite: result["environment"]["device"] for suite, result in results.items()}
    for name, label in SPEED_ROWS.items():
        forward, both = (_find(results["fig4"], name, STEPS, direction) for direction in (FORWARD, BOTH))
        body.append([label, *_cells(forward, both)])
    where = {
        suite: "" if device.split()[1] == devices["fig4"].split()[1] else f", on an {device.split()[1]}"
        for suite, device in devices.items()
    }
    timed = results["jax"]["rows"] if "jax" in results else []
    shown = {"form": "exp", "dqk": 128, "dhv": 256, "x": STEPS}
    from_jax = {(r["name"], r.get("direction")): r for r in timed if shown.items() <= r.items()}
    for name, label in SPEED_JAX.items():
        if (name, BOTH) in from_jax:
            found = [from_jax.get((name, direction), {}) for direction in (FORWARD, BOTH)]
            body.append([f"**{label}{where['jax']}**", *_cells(*found)])
    rows = {(r.get("group"), r["name"], r["direction"]): r for r in results["delta"]["rows"] if r.get("x") == STEPS}
    for group in SPEED_DELTA:
        for name, label in reversed(DELTA_COLUMNS.items()):
            found = [rows.get((group, name, direction), {}) for direction in (FORWARD, BOTH)]
            if any(found):
                bold = "**" * label.startswith("**")
                body.append([f"{bold}{label.strip('*')}, {group}{where['delta']}{bold}", *_cells(*found)])
    return table(["", "forward, ms", "forward + backward, ms", "memory, GiB"], body)


def training(results: dict[str, Row]) -> str:
    """Return the table of training steps of the 1.4B at the largest batch: tokens per second and memory in GiB."""
    body = []
    for name, label in TRAINING_ROWS.items():
        steps = [_find(results["train"], name + how, BATCH, STEP) for how in ("", ", torch.compile")]
        body.append(
            [label, *(f"{r['tokens_per_second']:,.0f} ({r['peak_bytes'] / 2**30:.0f})" if r else "-" for r in steps)]
        )
    return table(["tokens per second (GiB)", "eager", "`--compile`"], body)


def mamba(results: dict[str, Row]) -> str:
    """Return the table of Mamba-2 by length: milliseconds of tfla and mamba_ssm, and the ratio of their times."""
    result = results["mamba"]
    xs = sorted({row["x"] for row in result["rows"] if "x" in row})
    at = [(x, direction) for direction in (FORWARD, BOTH) for x in xs]
    found = {name: [_find(result, name, *where) for where in at] for name in MAMBA_ROWS}
    body = [[label, *map(_time, found[name])] for name, label in MAMBA_ROWS.items()]
    ratios = [
        f"{theirs['seconds'] / ours['seconds']:.1f}" if "seconds" in ours and "seconds" in theirs else "-"
        for ours, theirs in zip(*found.values(), strict=True)
    ]
    environment = result["environment"]
    header = [f"{direction}, {x:,}" if x == xs[0] else f"{x:,}" for x, direction in at]
    return table(
        [f"{environment['device']}, {environment['date']}, ms, by length", *header], [*body, ["ratio", *ratios]]
    )


def delta(results: dict[str, Row]) -> str:
    """Return the table of the delta rule's models at 8,192 steps: forward / forward + backward, memory in GiB.

    Results of other devices than the first one's are left out.
    """
    first = results["delta"]
    rows = {(r["group"], r["name"], r["direction"]): r for r in first["rows"] if r.get("x") == STEPS and "group" in r}
    body = []
    for group in dict.fromkeys(group for group, _, _ in rows):
        found = {name: [rows.get((group, name, d), {}) for d in (FORWARD, BOTH)] for name in DELTA_COLUMNS}
        bounds = [
            next((f[n]["floor_seconds"] for f in found.values() if "floor_seconds" in f[n]), None) for n in (0, 1)
        ]
        cells = [" / ".join("-" if x is None else milliseconds(x) for x in bounds)]
        for pair in found.values():
            memory = f" ({pair[1]['peak_bytes'] / 2**30:.1f})" if pair[1].get("peak_bytes") else ""
            cells.append(" / ".join(_time({k: x for k, x in r.items() if k != "floor_seconds"}) for r in pair) + memory)
        body.append([group, *cells])
    environment = first["environment"]
    return table([f"{environment['device']}, {environment['date']}", "roofline", *DELTA_COLUMNS.values()], body)


def jax(results: dict[str, Row]) -> str:
    """Return the table of the mLSTM from JAX and from PyTorch by length; empty as long as it has not been timed.

    It shows the result `jax_peers`, which has the other libraries at all sizes, or else `jax`.
    """
    return _beside_pytorch(results.get("jax_peers", results.get("jax")), delta=False)


def jax_delta(results: dict[str, Row]) -> str:
    """Return the table of the delta rule and of GLA from JAX and from PyTorch; empty as long as it is not timed."""
    return _beside_pytorch(results.get("jax"), delta=True)


def _beside_pytorch(result: Row | None, delta: bool) -> str:
    """Return a table of a result of `tfla.bench.jax_times`, a column for each problem of the mLSTM or of the others."""
    timed = [] if result is None else [r for r in result["rows"] if "seconds" in r]
    rows = [r for r in timed if (r.get("model", "mlstm") != "mlstm") == delta]
    if result is None or not rows:
        return ""
    environment = result["environment"]

    def setup_of(row: Row) -> tuple[Any, ...]:
        return row.get("model", "mlstm"), row.get("heads", 16), row["dqk"], row["dhv"], row["x"]

    setups = sorted(set(map(setup_of, rows)))
    found = {(r["name"], *setup_of(r), r["direction"]): r for r in rows}
    body = [
        [name, *(" / ".join(_time(found.get((name, *setup, d), {})) for d in (FORWARD, BOTH)) for setup in setups)]
        for name in dict.fromkeys(r["name"] for r in rows)
    ]
    if {"PyTorch", "JAX"} <= {row["name"] for row in rows}:
        ratios = (" / ".join(_over_pytorch(found, setup, d) for d in (FORWARD, BOTH)) for setup in setups)
        body.append(["JAX, times PyTorch", *ratios])
    header = [
        f"{'' if model == 'mlstm' else f'{model.upper()} {heads} x '}{dqk} x {dhv}, {x:,} steps"
        for model, heads, dqk, dhv, x in setups
    ]
    return table([f"{environment['device']}, {environment['date']}, ms", *header], body)


def _over_pytorch(found: dict[tuple[Any, ...], Row], setup: tuple[Any, ...], direction: str) -> str:
    """Return the time of JAX over that of PyTorch, or a dash where one is missing."""
    own, torch = (found.get((name, *setup, direction)) for name in ("JAX", "PyTorch"))
    return "-" if own is None or torch is None else f"{own['seconds'] / torch['seconds']:.3f}"


def _of_one_device(
    results: dict[str, Row], suite: str, names: list[str], x: int, direction: str
) -> tuple[list[Row], str]:
    """Return the rows of implementations, all of one result, and its device; a row that is missing is empty.

    A suite may have several results, each of one device. The latest result with all of the rows is used, else the
    latest one with any of them.
    """
    found = []
    for result in sorted(results.values(), key=lambda result: result["environment"]["date"], reverse=True):
        if result.get("suite") == suite:
            rows = [_find(result, name, x, direction) for name in names]
            timed = [row if "seconds" in row else {} for row in rows]
            found.append((timed, result["environment"]["device"]))
    for enough in (all, any):
        for rows, device in found:
            if enough(rows):
                return rows, device
    return [{} for _ in names], ""


def two_gpus(results: dict[str, Row]) -> str:
    """Return the table of one GPU and two: milliseconds of the operator, tokens per second in training, their ratio."""
    body = []
    for gate, title in (("sig", "sigmoid"), ("exp", "exponential")):
        for T in (2**16, 2**20):
            names = [f"tfla mLSTM{gate}, {n}" for n in GPUS]
            pair, device = _of_one_device(results, "context_parallel", names, T, BOTH)
            times = [row.get("seconds") for row in pair]
            cells = ["-" if t is None else milliseconds(t) for t in times]
            label = f"`tfla.mlstm`, {title} gate, {T:,} steps, forward and backward, ms"
            body.append([label, _model(device), *cells, _ratio(*times)])
    trained = [("train_parallel", SEQUENCES, "FSDP", "T 8,192, 2 sequences on each GPU, first version")]
    trained += [
        ("train_fsdp", sequences, name, f"T 8,192, {sequences} sequences on each GPU, {name}")
        for name in VARIANTS
        for sequences in (SEQUENCES, SEQUENCES + 1)
    ]  # fmt: skip
    trained += [
        ("train_long", T, "context parallel", f"T {T:,} with activation checkpointing, cp 2") for T in (2**17, 2**18)
    ]
    for suite, x, how, title in trained:
        passes = ", 2 passes" if "2 passes" in how else ""
        names = [f"tfla mLSTMexp, {GPUS[0]}{passes}", f"tfla mLSTMexp, {GPUS[1]}, {how}"]
        pair, device = _of_one_device(results, suite, names, x, STEP)
        one, two = (row.get("tokens_per_second") for row in pair)
        if two is None and suite == "train_fsdp":
            continue
        cells = ["-" if rate is None else f"{rate:,.0f}" for rate in (one, two)]
        body.append([f"1.4B, {title}, tokens/s", _model(device), *cells, _ratio(two, one)])
    return table(["", "GPU", "one", "two", "ratio"], body)


def _model(device: str) -> str:
    """Return the model of a GPU, such as H100, from its full name, such as NVIDIA H100 80GB HBM3."""
    return device.split()[1] if " " in device else device


def _ratio(a: float | None, b: float | None) -> str:
    """Return the cell of a / b."""
    return f"{a / b:.2f}" if a is not None and b is not None else ""


def mixers(results: dict[str, Row]) -> str:
    """Return the table of a layer of each mixer: milliseconds over 8,192 steps, and microseconds of a decoding step."""
    found = {name: results.get(name, {"rows": []}) for name in ("mixers", "mixers_decode")}
    body = []
    for name in get_args(Mixer):
        both = [_find(found["mixers"], f"tfla {name}", STEPS, direction) for direction in (FORWARD, BOTH)]
        steps = [_find(found["mixers_decode"], f"tfla {name}", batch, FORWARD) for batch in MIXER_BATCHES]
        facts = next((row for row in (*both, *steps) if "heads" in row), None) or facts_of(name)
        micro = [f"{row['seconds'] * 1e6:,.0f}" if "seconds" in row else _time(row) for row in steps]
        times = ["not run" if cell == "-" else cell for cell in (*map(_time, both), *micro)]
        body.append([f"`{name}`", facts["heads"], f"{facts['parameters'] / 1e6:.1f}", *times])
    places = {f"{r['environment']['device']}, {r['environment']['date']}" for r in found.values() if "environment" in r}
    header = ["; ".join(sorted(places)) or "not timed yet", "heads", "parameters, millions"]
    header += [f"{direction}, ms" for direction in (FORWARD, BOTH)]
    return table([*header, *(f"a step, batch {batch}, µs" for batch in MIXER_BATCHES)], body)


def speculate(results: dict[str, Row]) -> str:
    """Return the table of speculative decoding: tokens per second by draft and batch size."""
    suite, found = SUITES["speculate"], results.get("speculate", {"rows": []})
    cells = {(r["name"], r["x"]): f"{r['tokens_per_second']:,.0f}" for r in found["rows"] if "tokens_per_second" in r}
    body = [
        [entry.options["draft"], *(cells.get((entry.name, x), "not run") for x in suite.xs)] for entry in suite.entries
    ]
    return table([f"draft ({_place(found)})", *(f"tokens/s, batch {x}" for x in suite.xs)], body)


def first_calls(results: dict[str, Row]) -> str:
    """Return the table of first calls, with the GPU of each: seconds and numbers of kernels by form."""
    runs = [result for name, result in results.items() if name.startswith("first_calls")]
    timed = {row["name"]: (result, row) for result in runs for row in result["rows"] if row.get("first_calls")}
    body = []
    for entry in SUITES["first_calls"].entries:
        cells = ["not run", *["-"] * len(FIRST_CALLS)]
        if entry.name in timed:
            result, row = timed[entry.name]  # a row of merged runs has the environment of its own
            cells = [_place(result | row), *(f"{c['seconds']:.1f} ({c['kernels']})" for c in row["first_calls"])]
        body.append([f"`{entry.options['form']}`", *cells])
    return table(["form", "run", *(f"{name}, s (kernels)" for name in FIRST_CALLS)], body)


def _place(found: Row) -> str:
    """Return the device and the date of a result."""
    return (
        f"{found['environment']['device']}, {found['environment']['date']}"
        if "environment" in found
        else "not timed yet"
    )


TABLES = {"two_gpus": two_gpus, "delta": delta, "jax": jax, "jax_delta": jax_delta, "speed": speed,
          "training": training, "mamba": mamba, "mixers": mixers, "speculate": speculate,
          "first_calls": first_calls}  # fmt: skip


def renew(text: str, results: dict[str, Row]) -> str:
    """Return the text with the tables after all `<!-- table: NAME -->` made again from the results."""

    def replaced(found: re.Match[str]) -> str:
        lines = TABLES[found[2]](results)
        return f"{found[1]}\n{lines}\n" if lines else f"{found[1]}\n"

    return MARK.sub(replaced, text)
