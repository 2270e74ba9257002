"""The stored errors as figures and a table: by chunk size, by regime of the gates, by sequence length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tfla.paper.claims_template import fill
from tfla.paper.numerics.measure import DTYPES, ROUNDING
from tfla.paper.report_types import Claim, Figure, Missing, Options, Table, stored, write
from tfla.paper.style import BLUE, GREEN, MARKERS, RED, legend_beside, panels, power_of_two_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Config = Options
Row = dict[str, Any]
NAME, COMMAND = "numerics", "tfla analyze numerics"
MEASURE = "python -m tfla.paper.numerics.run --out benchmarks/results/numerics.json"
COLORS = dict(zip(DTYPES, (BLUE, RED, GREEN), strict=True))
# Mean absolute error of the forward of mLSTMexp by chunk size, T 8192, dqk 128, dhv 256, normal inputs, as the authors
# report it for their xl_chunk kernels in answer to a review.
PAPER = {
    64: (7.8761462e-4, 2.9082941e-3), 128: (7.8597685e-4, 2.9058390e-3), 256: (7.8570450e-4, 2.9046188e-3),
    512: (7.8560099e-4, 2.9047025e-3), 1024: (7.8498963e-4, 2.9049833e-3), 2048: (7.8578707e-4, 2.9037838e-3),
}  # fmt: skip
PAPER_DTYPES = ("float32", "bfloat16")
PANELS: dict[str, Callable[[dict[str, float]], float]] = {
    "output h": lambda error: error["h"],
    "worst gradient of q, k, v, state": lambda error: max(error[x] for x in error if x not in ("h", "di", "df")),
    "worse gradient of the gates": lambda error: max(error["di"], error["df"]),
}
Axis = Callable[[Row], Any]


def csv_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the CSV file, with a column for the error of each quantity."""
    return [
        {name: value for name, value in row.items() if name not in ("error", "seconds")}
        | {f"error_{name}": value for name, value in row.get("error", {}).items()}
        for row in rows
    ]


def line(rows: list[Row], implementation: str, dtype: str, axis: Axis, part: str) -> dict[Any, float]:
    """Return the larger error of the two gates by place on the axis."""
    found: dict[Any, float] = {}
    for row in rows:
        if (row["implementation"], row["dtype"]) == (implementation, dtype) and "error" in row:
            found[axis(row)] = max(found.get(axis(row), 0.0), PANELS[part](row["error"]))
    return found


def draw(axes: Axes, rows: list[Row], axis: Axis, places: list[Any], part: str) -> None:
    """Plot a line for each implementation and dtype, and the error of rounding alone as a dashed line."""
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    for dtype in DTYPES:
        for n, implementation in enumerate(implementations):
            found = line(rows, implementation, dtype, axis, part)
            if not found:
                continue
            alone = implementation == ROUNDING
            xs = [x for x in places if x in found or (alone and None in found)]
            axes.plot(
                [places.index(x) for x in xs], [found[x] if x in found else found[None] for x in xs],
                color=COLORS[dtype], label=f"{dtype}, {'rounding alone' if alone else implementation}",
                ls="--" if alone else "-", lw=1.4 if alone else 1.2, marker="" if alone else MARKERS[n], alpha=0.85,
            )  # fmt: skip
    axes.set_yscale("log")


def draw_errors(
    config: Config, result: Row, name: str, rows: list[Row], *, axis: Axis, places: list[Any], label: str, title: str,
    caption: str,
) -> Figure:  # fmt: skip
    """Draw three panels: errors of the output, of the gradients of q, k, v and state, and of those of the gates.

    Args:
        config: the options.
        result: the stored result.
        name: the name of the figure's files.
        rows: the rows to show.
        axis: returns the place of a row on the axis.
        places: the places, in their order.
        label: the label of the axis.
        title: the title of the figure.
        caption: what the figure shows.
    """
    drawing, [axes] = panels(1, len(PANELS), width=3.9, height=4.2, sharey=True)
    for one, part in zip(axes, PANELS, strict=True):
        draw(one, rows, axis, places, part)
        one.set(title=part, xlabel=label)
        one.set_xticks(range(len(places)), [f"{x:,}" if isinstance(x, int) else str(x) for x in places], rotation=45)
    axes[0].set_ylabel("relative error, ‖x - truth‖ / ‖truth‖")
    legend_beside(drawing, *axes)
    env = result["environment"]
    drawing.suptitle(f"{env['device']}, {env['date']}, torch {env['versions']['torch']}")
    return write(config, name, drawing, csv_rows(rows), title=title, caption=caption, command=COMMAND)


def gaussian(result: Row) -> list[Row]:
    """Return the rows of the axis of chunk sizes, and those of rounding alone, which has no chunk size."""
    return [
        row for row in result["rows"]
        if row["regime"] == "gaussian" and (row["chunk_size"] is not None or row["implementation"] == ROUNDING)
    ]  # fmt: skip


def mean_absolute(result: Row, dtype: str) -> dict[str, dict[int, float]]:
    """Return mean absolute errors of mLSTMexp's output by implementation and chunk size, with those of the authors."""
    found: dict[str, dict[int, float]] = {}
    for row in gaussian(result):
        if row["dtype"] == dtype and row["gate"] == "exp" and row["chunk_size"] and "error" in row:
            found.setdefault(row["implementation"], {})[row["chunk_size"]] = row["mean_absolute_error_h"]
    if dtype in PAPER_DTYPES:
        found["the paper's authors, xl_chunk"] = {L: e[PAPER_DTYPES.index(dtype)] for L, e in PAPER.items()}
    return found


def compare_with_the_paper(config: Config, result: Row) -> Figure:
    """Draw the mean absolute errors of the output beside those that the authors report."""
    drawing, [axes] = panels(1, 2, width=4.0, height=4.3)
    sizes = sorted({row["chunk_size"] for row in gaussian(result) if row["chunk_size"]})
    numbers: list[Row] = []
    for one, dtype in zip(axes, PAPER_DTYPES, strict=True):
        for n, (implementation, found) in enumerate(mean_absolute(result, dtype).items()):
            theirs = implementation.startswith("the paper")
            one.plot(
                list(found), list(found.values()), label=implementation, color="#333333" if theirs else COLORS[dtype],
                ls="--" if theirs else "-", marker=MARKERS[n],
            )  # fmt: skip
            numbers += [
                {"dtype": dtype, "implementation": implementation, "chunk_size": L, "error": e}
                for L, e in found.items()
            ]
        alone = next(
            row["mean_absolute_error_h"] for row in gaussian(result)
            if (row["implementation"], row["dtype"], row["gate"]) == (ROUNDING, dtype, "exp")
        )  # fmt: skip
        one.axhline(alone, color=COLORS[dtype], ls=":", label="rounding alone")
        numbers.append({"dtype": dtype, "implementation": ROUNDING, "error": alone})
        float32 = dtype == "float32"  # over four orders of magnitude
        one.set(yscale="log" if float32 else "linear", ylim=(2e-8, 3e-3) if float32 else (0, 3.5e-3), title=dtype)
        power_of_two_axis(one, sizes, "chunk size")
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes[0].set_ylabel("mean absolute error of h")
    return write(
        config, "numerics_paper", drawing, numbers, title="Mean absolute error of mLSTMexp's output by chunk size",
        caption="The lines are flat: no implementation loses accuracy in larger chunks. In float32 this library's "
        "kernels multiply in float32; the error of the authors is of the size that TF32 products have. Inputs are "
        "normal, T 8,192, dqk 128, dhv 256, as in their measurement. The truth is computed in float64, for rounding "
        "alone from inputs that are not rounded: in bfloat16, rounding alone has an error of the size that the authors "
        "report.",
        command=COMMAND,
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw the errors by chunk size, by gates, by length, and beside those of the authors."""
    result = stored(config, NAME)
    if result is None:
        why = f"no {config.results}/{NAME}.json: `{MEASURE}` measures it on this machine"
        return [Missing("numerics", "Errors against float64", why)]
    rows = [row for row in result["rows"] if row["dtype"] in DTYPES]
    T = result["grid"]["T"]
    default = [row for row in rows if row["chunk_size"] is None]
    regimes = [row for row in default if row["T"] == T]
    lengths = [row for row in default if row["regime"] == "model"]
    sizes = sorted({row["chunk_size"] for row in rows if row["chunk_size"]})
    above = (
        "The error is the larger one of both gates. The dashed lines show the error of rounding inputs and outputs to "
        "the dtype, with everything between computed in float64. Other errors are relative to the truth of the rounded "
        "inputs: a line below the dashed one adds less than the dtype itself."
    )
    return [
        draw_errors(
            config, result, "numerics_chunk", gaussian(result), axis=lambda row: row["chunk_size"], places=sizes,
            label="chunk size", title="Error by chunk size",
            caption=f"Normal inputs, T {T:,}. The errors of the output and of large gradients do not depend on the "
            "chunk size. The gradient of the forget gate is a running sum over a chunk, so its error grows with the "
            f"chunks of the fused scans.\n\n{above}",
        ),
        draw_errors(
            config, result, "numerics_gates", regimes, axis=lambda row: row["regime"], places=list(result["regimes"]),
            label="gates", title="Error by regime of the gates",
            caption="Resets and gates at ±1e4 and ±inf do not affect the output; the gradients of the gates lose most "
            "there. " + "; ".join(f"{name}: {text}" for name, text in result["regimes"].items()) + f".\n\n{above}",
        ),
        draw_errors(
            config, result, "numerics_length", lengths, axis=lambda row: row["T"],
            places=sorted({row["T"] for row in lengths}), label="T", title="Error by sequence length",
            caption="Rounding errors do not accumulate along a sequence. The gates are those of a model early in "
            f"training.\n\n{above}",
        ),
        compare_with_the_paper(config, result),
    ]  # fmt: skip


def worst(result: Row) -> Table:
    """Return a table of the largest error of each quantity over both gates and all chunk sizes, lengths, regimes."""
    quantities = ("h", "dq", "dk", "dv", "di", "df", "dC", "dn", "dm")
    rows = []
    for dtype in DTYPES:
        for implementation in dict.fromkeys(row["implementation"] for row in result["rows"]):
            errors = [
                r["error"]
                for r in result["rows"]
                if (r["implementation"], r["dtype"]) == (implementation, dtype) and "error" in r
            ]
            if errors:
                found = [max((e[name] for e in errors if name in e), default=None) for name in quantities]
                label = "rounding alone" if implementation == ROUNDING else implementation
                rows.append([dtype, label, *("-" if x is None else f"{x:.1e}" for x in found)])
    return Table(["dtype", "implementation", *quantities], rows)


def span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value as text; one of them where they are within 5 %."""
    found = sorted(values)
    return f"{found[0]:.2g}" if found[0] * 1.05 > found[-1] else f"{found[0]:.2g} to {found[-1]:.2g}"


def claims(config: Config) -> list[Claim]:
    """Return the claims about accuracy with the stored errors; none where there are no stored errors."""
    result = stored(config, NAME)
    if result is None:
        return []
    ours = {
        d: [e for name, found in mean_absolute(result, d).items() if not name.startswith("the paper")
            for e in found.values()]
        for d in PAPER_DTYPES
    }  # fmt: skip
    theirs = {d: [e[n] for e in PAPER.values()] for n, d in enumerate(PAPER_DTYPES)}
    measured = [row for row in result["rows"] if row["implementation"] != ROUNDING and row["dtype"] in DTYPES]
    failed = [row for row in measured if "failed" in row]
    drift = max(
        max(found.values()) / min(found.values()) for d in PAPER_DTYPES
        for implementation, found in mean_absolute(result, d).items() if not implementation.startswith("the paper")
    )  # fmt: skip
    gates = {
        d: max(row["error"]["df"] for row in measured if row["dtype"] == d and "error" in row) for d in PAPER_DTYPES
    }  # fmt: skip
    check = max(e for row in result["rows"] if row["dtype"] == "float64" for e in row["error"].values())
    env = result["environment"]
    where = f"{env['device']}, {env['date']}"
    return fill(
        {
            "accuracy": {
                **{f"paper_{d}": span(theirs[d]) for d in PAPER_DTYPES},
                **{d: span(ours[d]) for d in PAPER_DTYPES},
                "holds": drift < 1.1,
                "drift": f"{drift:.2f}",
                "where": where,
            },
            "gradients": {
                "measured": str(len(measured) - len(failed)),
                "settings": str(len(measured)),
                **{d: f"{gates[d]:.1g}" for d in PAPER_DTYPES},
                "check": f"{check:.0e}",
                "chunk_sizes": str(len(result["grid"]["chunk_sizes"])),
                "lengths": str(len(result["grid"]["lengths"])),
                "where": where,
                "table": worst(result),
            },
        }
    )
