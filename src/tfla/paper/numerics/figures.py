"""The stored errors as figures and tables: by chunk size, regime of the gates and length."""

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
PARTS: dict[str, Callable[[dict[str, float]], float]] = {
    "output h": lambda error: error["h"],
    "worst gradient of q, k, v, state": lambda error: max(error[x] for x in error if x not in ("h", "di", "df")),
    "worse gradient of the gates": lambda error: max(error["di"], error["df"]),
}
Axis = Callable[[Row], Any]


def flat(rows: Iterable[Row]) -> list[Row]:
    """Rows as the CSV has them: a column for every quantity."""
    return [
        {name: value for name, value in row.items() if name not in ("error", "seconds")}
        | {f"error_{name}": value for name, value in row.get("error", {}).items()}
        for row in rows
    ]


def line(rows: list[Row], way: str, dtype: str, axis: Axis, part: str) -> dict[Any, float]:
    """The larger error of both gates by place on the axis."""
    found: dict[Any, float] = {}
    for row in rows:
        if (row["way"], row["dtype"]) == (way, dtype) and "error" in row:
            found[axis(row)] = max(found.get(axis(row), 0.0), PARTS[part](row["error"]))
    return found


def draw(axes: Axes, rows: list[Row], axis: Axis, places: list[Any], part: str) -> None:
    """A line for each way and dtype; what rounding alone costs is dashed."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for dtype in DTYPES:
        for n, way in enumerate(ways):
            found = line(rows, way, dtype, axis, part)
            if not found:
                continue
            alone = way == ROUNDING
            xs = [x for x in places if x in found or (alone and None in found)]
            axes.plot(
                [places.index(x) for x in xs], [found[x] if x in found else found[None] for x in xs],
                color=COLORS[dtype], label=f"{dtype}, {'rounding alone' if alone else way}",
                ls="--" if alone else "-", lw=1.4 if alone else 1.2, marker="" if alone else MARKERS[n], alpha=0.85,
            )  # fmt: skip
    axes.set_yscale("log")


def by(
    config: Config, result: Row, name: str, title: str, caption: str, rows: list[Row], axis: Axis, places: list[Any],
    label: str,
) -> Figure:  # fmt: skip
    """Three panels: the output, the gradients of what is large, those of the gates."""
    drawing, [axes] = panels(1, len(PARTS), width=3.9, height=4.2, sharey=True)
    for one, part in zip(axes, PARTS, strict=True):
        draw(one, rows, axis, places, part)
        one.set(title=part, xlabel=label)
        one.set_xticks(range(len(places)), [f"{x:,}" if isinstance(x, int) else str(x) for x in places], rotation=45)
    axes[0].set_ylabel("relative error, ‖x - truth‖ / ‖truth‖")
    legend_beside(drawing, *axes)
    env = result["environment"]
    drawing.suptitle(f"{env['device']}, {env['date']}, torch {env['versions']['torch']}")
    return write(config, name, drawing, flat(rows), title=title, caption=caption, command=COMMAND)


def gaussian(result: Row) -> list[Row]:
    """Those of the axis of chunk sizes, and rounding alone, which has none."""
    return [
        row for row in result["rows"]
        if row["regime"] == "gaussian" and (row["chunk_size"] is not None or row["way"] == ROUNDING)
    ]  # fmt: skip


def mean_absolute(result: Row, dtype: str) -> dict[str, dict[int, float]]:
    """Mean absolute errors of mLSTMexp's output by way and chunk size, the authors' among them."""
    found: dict[str, dict[int, float]] = {}
    for row in gaussian(result):
        if row["dtype"] == dtype and row["gate"] == "exp" and row["chunk_size"] and "error" in row:
            found.setdefault(row["way"], {})[row["chunk_size"]] = row["mean_absolute_error_h"]
    if dtype in PAPER_DTYPES:
        found["the paper's authors, xl_chunk"] = {L: e[PAPER_DTYPES.index(dtype)] for L, e in PAPER.items()}
    return found


def beside_the_paper(config: Config, result: Row) -> Figure:
    """The one measurement of numerics that the authors report."""
    drawing, [axes] = panels(1, 2, width=4.0, height=4.3)
    sizes = sorted({row["chunk_size"] for row in gaussian(result) if row["chunk_size"]})
    numbers: list[Row] = []
    for one, dtype in zip(axes, PAPER_DTYPES, strict=True):
        for n, (way, found) in enumerate(mean_absolute(result, dtype).items()):
            theirs = way.startswith("the paper")
            one.plot(
                list(found), list(found.values()), label=way, color="#333333" if theirs else COLORS[dtype],
                ls="--" if theirs else "-", marker=MARKERS[n],
            )  # fmt: skip
            numbers += [{"dtype": dtype, "way": way, "chunk_size": L, "error": e} for L, e in found.items()]
        alone = next(
            row["mean_absolute_error_h"] for row in gaussian(result)
            if (row["way"], row["dtype"], row["gate"]) == (ROUNDING, dtype, "exp")
        )  # fmt: skip
        one.axhline(alone, color=COLORS[dtype], ls=":", label="rounding alone")
        numbers.append({"dtype": dtype, "way": ROUNDING, "error": alone})
        float32 = dtype == "float32"  # over four orders of magnitude
        one.set(yscale="log" if float32 else "linear", ylim=(2e-8, 3e-3) if float32 else (0, 3.5e-3), title=dtype)
        power_of_two_axis(one, sizes, "chunk size")
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes[0].set_ylabel("mean absolute error of h")
    return write(
        config, "numerics_paper", drawing, numbers, title="Mean absolute error of mLSTMexp's output by chunk size",
        caption="Flat lines: no form loses accuracy in larger chunks. In float32 this library's kernels multiply in "
        "float32; the size of the authors' error there is that of TF32 products. Inputs are normal, T 8,192, dqk 128, "
        "dhv 256, as theirs; the truth is float64, for rounding alone with inputs not rounded: in bfloat16 that "
        "alone is of the size which the authors report.",
        command=COMMAND,
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Errors by chunk size, by gates, by length, and beside the authors' figures."""
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
        "The larger error of both gates; the dashed lines are what rounding inputs and outputs to the dtype costs when "
        "everything between is computed in float64. Errors start from rounded inputs: a line below the dashed one adds "
        "less than the dtype itself."
    )
    return [
        by(
            config, result, "numerics_chunk", "Error by chunk size",
            f"Normal inputs, T {T:,}. Output and large gradients do not depend on the chunk size. The forget gate's "
            f"gradient is a running sum over a chunk, so its error grows with the walks' chunks.\n\n{above}",
            gaussian(result), lambda row: row["chunk_size"], sizes, "chunk size",
        ),
        by(
            config, result, "numerics_gates", "Error by regime of the gates",
            "Resets and gates at ±1e4 and ±inf cost the output nothing; gradients of the gates lose most there. "
            + "; ".join(f"{name}: {text}" for name, text in result["regimes"].items()) + f".\n\n{above}",
            regimes, lambda row: row["regime"], list(result["regimes"]), "gates",
        ),
        by(
            config, result, "numerics_length", "Error by sequence length",
            f"Rounding does not pile up along a sequence. Gates of a model early in training.\n\n{above}",
            lengths, lambda row: row["T"], sorted({row["T"] for row in lengths}), "T",
        ),
        beside_the_paper(config, result),
    ]  # fmt: skip


def worst(result: Row) -> Table:
    """The largest error of every quantity over both gates and all chunk sizes, lengths and regimes."""
    quantities = ("h", "dq", "dk", "dv", "di", "df", "dC", "dn", "dm")
    rows = []
    for dtype in DTYPES:
        for way in dict.fromkeys(row["way"] for row in result["rows"]):
            errors = [r["error"] for r in result["rows"] if (r["way"], r["dtype"]) == (way, dtype) and "error" in r]
            if errors:
                found = [max((e[name] for e in errors if name in e), default=None) for name in quantities]
                label = "rounding alone" if way == ROUNDING else way
                rows.append([dtype, label, *("-" if x is None else f"{x:.1e}" for x in found)])
    return Table(["dtype", "implementation", *quantities], rows)


def span(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2g}" if found[0] * 1.05 > found[-1] else f"{found[0]:.2g} to {found[-1]:.2g}"


def claims(config: Config) -> list[Claim]:
    """Return the claims about accuracy with the stored errors; none where there are no stored errors."""
    result = stored(config, NAME)
    if result is None:
        return []
    ours = {d: [e for way, found in mean_absolute(result, d).items() if not way.startswith("the paper")
                for e in found.values()] for d in PAPER_DTYPES}  # fmt: skip
    theirs = {d: [e[n] for e in PAPER.values()] for n, d in enumerate(PAPER_DTYPES)}
    measured = [row for row in result["rows"] if row["way"] != ROUNDING and row["dtype"] in DTYPES]
    failed = [row for row in measured if "failed" in row]
    drift = max(
        max(found.values()) / min(found.values()) for d in PAPER_DTYPES
        for way, found in mean_absolute(result, d).items() if not way.startswith("the paper")
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
