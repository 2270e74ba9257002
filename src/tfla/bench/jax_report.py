"""The section of docs/performance.md from stored results of `python -m tfla.bench.jax_times`."""

from __future__ import annotations

from typing import Any

from tfla._util.markdown import table

Row = dict[str, Any]


def section(result: Row) -> str:
    """Return the section of one result."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v)
    config = result["config"]
    parts = [
        "### JAX beside PyTorch, 65,536 tokens, 16 heads",
        f"{environment['device']}, {environment['date']}; {versions}. mLSTM from the public functions, bfloat16, "
        f"jitted in JAX. Milliseconds: medians of {config['repeats']} runs of {config['calls']} calls back to back.",
    ]
    rows = [row for row in result["rows"] if "seconds" in row]
    shapes = list(dict.fromkeys((row["dqk"], row["dhv"], row["form"]) for row in rows))
    for dqk, dhv, form in shapes:
        own = [row for row in rows if (row["dqk"], row["dhv"], row["form"]) == (dqk, dhv, form)]
        lengths = sorted({row["x"] for row in own})
        name = f"mLSTM{'exp' if form == 'exp' else 'sig'} {dqk} x {dhv}"
        cells = []
        for label, direction in dict.fromkeys((row["name"], row["direction"]) for row in own):
            found = {row["x"]: row for row in own if (row["name"], row["direction"]) == (label, direction)}
            cells.append([f"{label}, {direction}", *(_cell(found.get(T)) for T in lengths)])
        parts.append(table([f"{name}, ms (first call; memory)", *(f"T = {T:,}" for T in lengths)], cells))
    errors = dict.fromkeys(f"{row['name']}: {row['error']}" for row in result["rows"] if "error" in row)
    parts += [f"Not timed: {text}." for text in errors]
    parts.append(
        "The first call includes compilation with empty caches. Memory is what a call allocates beyond its inputs. "
        "Reproduce: `python -m tfla.bench.jax_times --out benchmarks/results/jax.json`"
    )
    return "\n\n".join(parts)


def _cell(row: Row | None) -> str:
    """Return the time, the time of the first call, and the memory of a row."""
    if row is None:
        return "-"
    return f"{row['seconds'] * 1e3:.3f} ({row['first_seconds']:.1f} s; {row['peak_bytes'] / 2**30:.2f} GiB)"
