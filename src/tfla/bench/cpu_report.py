"""The section of docs/performance.md from stored results of `tfla bench cpu`."""

from __future__ import annotations

from typing import Any

from tfla._util.markdown import table


def milliseconds(row: dict[str, Any] | None) -> str:
    """Return the cell of a row: milliseconds and the ratio to the roofline, or its error."""
    if row is None:
        return "-"
    if "error" in row:
        return str(row["error"])
    return f"{row['seconds'] * 1e3:,.1f} ({row['ratio']:.2f} ×)"


def section(result: dict[str, Any]) -> str:
    """Return the section of one result."""
    env = result["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in env["versions"].items() if v)
    shape = env["shape"]
    parts = [
        "## On a CPU",
        f"{env['cpu']}, {env['threads']} threads, {env['date']}; {versions}. B {shape['B']}, {shape['H']} heads, "
        f"dqk {shape['dqk']}, dhv {shape['dhv']}, {shape['dtype']}. Median milliseconds, and in brackets the ratio to "
        "the roofline: the FLOPs of the form (`measure/roofline.py`) at the rate of a large matrix product, timed in "
        "between.",
    ]
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    for direction in ("forward", "forward + backward"):
        found = {(r["T"], r["name"]): r for r in result["rows"] if r.get("direction", direction) == direction}
        lengths = sorted({r["T"] for r in result["rows"]})
        rows = [[name, *(milliseconds(found.get((T, name))) for T in lengths)] for name in names]
        roofline = [
            "roofline",
            *(
                f"{next(r['floor_seconds'] for (t, _), r in found.items() if t == T and 'seconds' in r) * 1e3:,.1f}"
                for T in lengths
            ),
        ]
        parts.append(table([direction, *(f"T = {T:,}" for T in lengths)], [*rows, roofline]))
    if result["memory"]:
        rows = [
            ["tfla mLSTMexp, forward + backward", *(f"{m['extra_bytes'] / 2**20:,.0f} MiB" for m in result["memory"])]
        ]
        parts.append(
            table(["memory beyond inputs, output, gradients", *(f"T = {m['T']:,}" for m in result["memory"])], rows)
        )
    config = result["config"]
    command = f"tfla bench cpu --repeats {config['repeats']} --attention-up-to {config['attention_up_to']}"
    parts.append(f"Reproduce: `{command} --out benchmarks/results/cpu.json` (mlstm_kernels is timed where installed).")
    return "\n\n".join(parts)
