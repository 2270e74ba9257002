"""The section of docs/performance.md from stored results of `python -m tfla.bench.jax_times`."""

from __future__ import annotations

from typing import Any

from tfla._util.markdown import table

Row = dict[str, Any]


def section(result: Row, name: str = "jax") -> str:
    """Return the section of one result, which is stored in a file of that name."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v)
    config = result["config"]
    rows = [row for row in result["rows"] if "seconds" in row]
    models = dict.fromkeys(_label(row).split()[0] for row in rows)
    parts = [
        f"### JAX beside PyTorch, 65,536 tokens: {', '.join(models)}",
        f"{environment['device']}, {environment['date']}; {versions}. Public functions, bfloat16, jitted in JAX. "
        f"Milliseconds: medians of {config['repeats']} runs of at least {config['calls']} calls back to back, of "
        "PyTorch and JAX in turn.",
    ]
    for problem in dict.fromkeys(map(_label, rows)):
        own = [row for row in rows if _label(row) == problem]
        lengths = sorted({row["x"] for row in own})
        cells = []
        for label, direction in dict.fromkeys((row["name"], row["direction"]) for row in own):
            found = {row["x"]: row for row in own if (row["name"], row["direction"]) == (label, direction)}
            cells.append([f"{label}, {direction}", *(_cell(found.get(T)) for T in lengths)])
        parts.append(table([f"{problem}, ms (first call; memory)", *(f"T = {T:,}" for T in lengths)], cells))
    errors = dict.fromkeys(f"{row['name']}: {row['error']}" for row in result["rows"] if "error" in row)
    parts += [f"Not timed: {text}." for text in errors]
    parts.append(
        "The first call includes compilation with empty caches. Memory is what a call allocates beyond its inputs. "
        f"Reproduce: `{_command(config)} --out benchmarks/results/{name}.json`"
    )
    return "\n\n".join(parts)


def _command(config: Row) -> str:
    """Return the command that measured a result, without the file that it writes."""
    options = {key: config[key] for key in ("models", "head_dims", "repeats", "workers", "budget") if key in config}
    given = [
        f"--{key.replace('_', '-')} {' '.join(value) if isinstance(value, list) else value}"
        for key, value in options.items()
    ]
    return " ".join(["python -m tfla.bench.jax_times", *given])


def _label(row: Row) -> str:
    """Return the model of a row, its heads and its head dims."""
    model = row.get("model", "mlstm")
    name = f"mLSTM{'exp' if row['form'] == 'exp' else 'sig'}" if model == "mlstm" else model.upper()
    return f"{name} {row.get('heads', 16)} x {row['dqk']} x {row['dhv']}"


def _cell(row: Row | None) -> str:
    """Return the time of a row, and the time and the memory of its first call unless that was not measured."""
    if row is None:
        return "-"
    first = "-" if "first_seconds" not in row else f"{row['first_seconds']:.1f} s; {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{row['seconds'] * 1e3:.3f} ({first})"
