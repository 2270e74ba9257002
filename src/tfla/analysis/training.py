"""What small training runs found: Tables 2, 3, 5 and 6, Figures 8 to 11, from the file that `tfla experiment` wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfla.analysis.frame import Claim, Figure, Missing, Options, write
from tfla.analysis.style import CYCLE, EXP, GREEN, MARKERS, SIG, panels
from tfla.experiments.plans import BIASES, EPSILONS, EXPERIMENTS, LONGER, MIXERS, MLSTMS, SEEDS, Mixer, Variant
from tfla.train.messages import UserError, reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
COMMAND = "tfla analyze training"
MEASURE = "tfla experiment all --size small --out benchmarks/results/training.json"
NAMES: dict[Mixer, str] = {"mlstm_exp": "mLSTMexp", "mlstm_sig": "mLSTMsig", "attention": "Llama (attention)"}
COLORS: dict[Mixer, str] = {"mlstm_exp": EXP, "mlstm_sig": SIG, "attention": GREEN}
SPIKE = 10.0  # times the median: a gradient norm that counts as a spike


@dataclass
class Config(Options):
    """Options of `tfla analyze training`."""

    training: Path | None = None
    """What `tfla experiment` wrote; None: training.json among the stored measurements."""


class Found:
    """The runs of one file by variant."""

    def __init__(self, result: Row) -> None:
        self.result = result
        fields = Variant.__dataclass_fields__
        self.runs = {Variant(**{name: row[name] for name in fields}): row for row in result["runs"]}

    def trained(self, variant: Variant) -> Row | None:
        """The run if it went to its end."""
        row = self.runs.get(variant)
        done = row is not None and "failed" not in row and bool(row.get("evals"))
        return row if row is not None and done and row["evals"][-1]["step"] == self.steps else None

    @property
    def steps(self) -> int:
        return int(self.result["size"]["steps"])

    def last(self, variant: Variant, name: str) -> float | None:
        """Of the last evaluation on the held-out part: bits_per_byte, perplexity or loss."""
        row = self.trained(variant)
        return None if row is None else row["evals"][-1][name]

    def all_of(self, variants: Iterable[Variant], name: str = "bits_per_byte") -> list[float]:
        return [x for v in variants if (x := self.last(v, name)) is not None]

    @property
    def where(self) -> str:
        size, env = self.result["size"], self.result["environment"]
        tokens = size["steps"] * size["batch_size"] * size["context"]
        return (
            f"{size['num_blocks']} blocks of width {size['d_model']}, {tokens / 1e6:.1f} million bytes of Python's "
            f"standard library, {env['device']}, {env['date']}"
        )


def load(config: Config) -> Found | None:
    """The file of the options; None if it is not there.

    Raises:
        UserError: it is there but no such file, or was named and is not there.
    """
    path = config.training or config.results / "training.json"
    if not path.exists() and config.training is None:
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("kind") != "training":
            raise ValueError("not what tfla experiment writes")
        return Found(result)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"training: {path} cannot be read: {reason(error)}") from error


def text(values: Sequence[float], digits: int = 3) -> str:
    """The mean, with the standard deviation of several."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


@dataclass(frozen=True)
class Line:
    """A row of a table: a label, whose colour, and its runs."""

    label: str
    mixer: Mixer
    variants: tuple[Variant, ...]


def _seeds(variant: Variant) -> tuple[Variant, ...]:
    return tuple(replace(variant, seed=seed) for seed in SEEDS)


TABLES: dict[str, list[Line]] = {
    "Table 2: by heads": [
        Line(f"{NAMES[mixer]}, {heads} heads", mixer, _seeds(Variant(mixer, heads=heads)))
        for heads in (2, 4) for mixer in MIXERS
    ],
    f"Table 5: {LONGER} times the context": [
        Line(NAMES[mixer], mixer, _seeds(Variant(mixer, longer=LONGER))) for mixer in MIXERS
    ],
    "Table 6: input gate": [
        Line(f"{NAMES[mixer]}, {'learnable' if trainable else 'fixed'}", mixer, (Variant(mixer, trainable=trainable),))
        for mixer in MLSTMS for trainable in (True, False)
    ],
    "Table 3: backends, 1 head": [
        Line(f"{NAMES[v.mixer]}, {v.backend}", v.mixer, (v,)) for v in EXPERIMENTS["table3"].variants
    ],
}  # fmt: skip


def tables(config: Config, found: Found) -> Figure:
    """All tables as dots: a dot for each run, and its number."""
    present = {
        title: [line for line in lines if found.all_of(line.variants)] for title, lines in TABLES.items()
    }  # fmt: skip
    present = {title: lines for title, lines in present.items() if lines}
    drawing, axes = panels(
        len(present), 1, width=8.0, height=1.0, sharex=True,
        height_ratios=[len(lines) + 1.5 for lines in present.values()],
    )  # fmt: skip
    drawing.set_size_inches(8.0, 0.32 * sum(len(lines) + 1.8 for lines in present.values()) + 0.6)
    numbers: list[Row] = []
    for (one,), (title, lines) in zip(axes, present.items(), strict=True):
        for y, line in enumerate(lines):
            values = found.all_of(line.variants)
            perplexities = found.all_of(line.variants, "perplexity")
            one.plot(values, [y] * len(values), ls="", marker="o", color=COLORS[line.mixer], alpha=0.8)
            one.annotate(
                f"{text(values)}, perplexity {text(perplexities)}", (1.01, y), xycoords=("axes fraction", "data"),
                va="center", fontsize=8.5,
            )  # fmt: skip
            numbers += [
                {"table": title, "model": line.label, "seed": v.seed, "bits_per_byte": found.last(v, "bits_per_byte"),
                 "perplexity": found.last(v, "perplexity"), "parameters": found.runs[v]["parameters"]}
                for v in line.variants if found.trained(v) is not None
            ]  # fmt: skip
        one.set_yticks(range(len(lines)), [line.label for line in lines])
        one.set_ylim(len(lines) - 0.4, -0.6)
        one.set_title(title, loc="left")
    axes[-1][0].set_xlabel("held-out bits per byte")
    return write(
        config, "training_tables", drawing, numbers,
        title="Tables 2, 3, 5 and 6: held-out text at equal size and tokens",
        caption="A dot is a run; with several seeds the number is their mean ± standard deviation. Perplexity is per "
        f"byte. {found.where}. Differences within the spread of seeds say nothing.",
        command=COMMAND,
    )  # fmt: skip


def curve(axes: Axes, row: Row, what: str, **look: Any) -> None:
    """grad_norm at every step, the others at every tenth."""
    values = row[what]
    steps = range(1, len(values) + 1) if what == "grad_norm" else row["step"]
    axes.plot(steps, values, **look)


def gate_biases(config: Config, found: Found, mixer: Mixer, name: str, title: str) -> Figure:
    """Figures 8 and 9: held-out text and gradient norm by the input gate's bias, trainable and fixed."""
    drawing, axes = panels(2, 2, width=4.4, height=2.9, sharex=True)
    numbers: list[Row] = []
    for column, trainable in enumerate((True, False)):
        above, below = axes[0][column], axes[1][column]
        for n, bias in enumerate(BIASES):
            row = found.runs.get(Variant(mixer, bias=bias, trainable=trainable))
            if row is None or "evals" not in row:
                continue
            evals = [e for e in row["evals"] if e["step"]]
            last = f", {evals[-1]['bits_per_byte']:.3f}" if evals else ""
            look: dict[str, Any] = {"color": CYCLE[n], "label": f"bias {bias:g}{last}"}
            above.plot([e["step"] for e in evals], [e["bits_per_byte"] for e in evals], marker=MARKERS[n], **look)
            curve(below, row, "grad_norm", color=CYCLE[n], lw=0.8, alpha=0.85, label=f"bias {bias:g}")
            numbers += [
                {"trainable": trainable, "bias": bias, "step": step, "grad_norm": norm}
                for step, norm in enumerate(row["grad_norm"], 1)
            ]  # fmt: skip
        above.set_title("trainable input gate" if trainable else "fixed input gate")
        if above.lines:
            above.legend()
        below.set(yscale="log", xlabel="step")
        below.axhline(found.result["config"]["optim"]["clip"], color="#333333", lw=1, ls="--", label="clipped above")
    for one in axes[0]:
        one.set_ylim(*limits(line.get_ydata() for line in (*axes[0][0].lines, *axes[0][1].lines)))
    axes[0][0].set_ylabel("held-out bits per byte")
    axes[1][0].set_ylabel("gradient norm")
    axes[1][0].legend(loc="upper right", fontsize=7.5)
    return write(
        config, name, drawing, numbers, title=title,
        caption="Above, held-out text; the number is at the end. Below, the norm of the gradient before clipping at "
        f"every step: spikes are single steps. {found.where}, seed 0.",
        command=COMMAND,
    )  # fmt: skip


def limits(lines: Iterable[Any]) -> tuple[float, float]:
    """A little more than from the least to the largest value of all lines."""
    values = [float(y) for line in lines for y in line]
    low, high = min(values), max(values)
    edge = 0.05 * (high - low) or 0.1
    return low - edge, high + edge


def grid(config: Config, found: Found) -> Figure | Missing:
    """Figure 10: held-out text by norm epsilon and input gate bias."""
    import numpy as np

    at = {(eps, bias): found.last(Variant("mlstm_exp", eps=eps, bias=bias), "bits_per_byte")
          for eps in EPSILONS for bias in BIASES}  # fmt: skip
    title = "Figure 10: held-out text by norm epsilon and input gate bias"
    if not any(value is not None for value in at.values()):
        return Missing("fig10", title, f"no finished runs: `{MEASURE}`")
    drawing, [[axes]] = panels(1, 1, width=4.8, height=3.6)
    values = np.array([[np.nan if at[eps, b] is None else at[eps, b] for eps in EPSILONS] for b in BIASES], float)
    drawn = axes.imshow(values, aspect="auto", cmap="viridis_r")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for y in range(len(BIASES)):
        for x in range(len(EPSILONS)):
            if np.isfinite(values[y, x]):
                color = "white" if values[y, x] > middle else "black"
                axes.text(x, y, f"{values[y, x]:.3f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(EPSILONS)), [f"{eps:g}" for eps in EPSILONS])
    axes.set_yticks(range(len(BIASES)), [f"{b:g}" for b in BIASES])
    axes.set(xlabel="epsilon of the norm over a head", ylabel="input gate bias at the start")
    axes.grid(False)
    drawing.colorbar(drawn, ax=axes, label="held-out bits per byte")
    return write(
        config, "fig10", drawing, [{"eps": e, "bias": b, "bits_per_byte": value} for (e, b), value in at.items()],
        title=title, command=COMMAND,
        caption=f"mLSTMexp, one seed each; darker is worse. {found.where}. The standard deviation over seeds at the "
        f"paper's choice is {spread(found):.3f}.",
    )  # fmt: skip


def spread(found: Found) -> float:
    """Standard deviation over the seeds of the default mLSTMexp; nan with fewer than two."""
    values = found.all_of(_seeds(Variant("mlstm_exp")))
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def gates_over_training(config: Config, found: Found) -> Figure | Missing:
    """Figure 11: the largest input gate pre-activation."""
    title = "Figure 11: largest input gate pre-activation over training"
    runs = [(v, found.runs[v]) for v in EXPERIMENTS["fig11"].variants if found.runs.get(v, {}).get("step")]
    if not runs:
        return Missing("fig11", title, f"no runs: `{MEASURE}`")
    drawing, [[axes]] = panels(1, 1, width=5.4, height=3.4)
    for variant, row in runs:
        curve(
            axes, row, "max_input_gate", color=COLORS[variant.mixer], lw=1.2, alpha=0.8,
            label=NAMES[variant.mixer] if variant.seed == 0 else "_",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="largest ĩ over batch, time, heads, blocks")
    axes.legend()
    numbers = [
        {"model": NAMES[v.mixer], "seed": v.seed, "step": step, "max_input_gate": i}
        for v, row in runs for step, i in zip(row["step"], row["max_input_gate"], strict=True)
    ]  # fmt: skip
    return write(
        config, "fig11", drawing, numbers, title=title, command=COMMAND,
        caption=f"A line is a seed; biases start at -10. {found.where}.",
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Everything that the runs of the file can show."""
    found = load(config)
    if found is None:
        why = f"no {config.results}/training.json: `{MEASURE}` trains the models"
        return [Missing("training", "Tables 2, 3, 5, 6 and Figures 8 to 11", why)]
    drawn: list[Figure | Missing] = []
    if any(found.all_of(line.variants) for lines in TABLES.values() for line in lines):
        drawn.append(tables(config, found))
    for mixer, name, number in (("mlstm_exp", "fig8", 8), ("mlstm_sig", "fig9", 9)):
        kind: Mixer = "mlstm_exp" if mixer == "mlstm_exp" else "mlstm_sig"
        title = f"Figure {number}: {NAMES[kind]} by input gate bias"
        if any(v in found.runs for v in EXPERIMENTS[name].variants):
            drawn.append(gate_biases(config, found, kind, name, title))
        else:
            drawn.append(Missing(name, title, f"no runs: `tfla experiment {name}`"))
    return [*drawn, grid(config, found), gates_over_training(config, found)]


def spikes(row: Row) -> tuple[int, float]:
    """How many steps of the second half have a gradient norm of SPIKE times its median, and largest over median."""
    later = row["grad_norm"][len(row["grad_norm"]) // 2 :]
    middle = statistics.median(later)
    return sum(x > SPIKE * middle for x in later), max(later) / middle


def claims(config: Config) -> list[Claim]:
    """What the paper's training experiments say, beside the small ones."""
    found = load(Config(out=config.out, results=config.results))
    if found is None:
        return []
    mean = {m: found.all_of(_seeds(Variant(m))) for m in MIXERS}
    by_heads = {m: found.all_of(_seeds(Variant(m, heads=4))) for m in MIXERS}
    return [
        Claim(
            "mLSTMsig learns as mLSTMexp does",
            "that mLSTMsig performs equally well as mLSTMexp, and both about as Llama: 21.03, 21.03 and 20.89 at 160M "
            "parameters and 19B tokens (Table 2).",
            f"bits per byte of {text(mean['mlstm_exp'])} (mLSTMexp), {text(mean['mlstm_sig'])} (mLSTMsig) and "
            f"{text(mean['attention'])} (attention in the same block) over {len(mean['mlstm_exp'])} seeds with 2 heads"
            + (
                f"; {text(by_heads['mlstm_exp'])}, {text(by_heads['mlstm_sig'])}, {text(by_heads['attention'])} with 4"
                if by_heads["mlstm_exp"] else ""
            ) + f". {found.where}: a fraction of the paper's sizes, so no ranking follows.",
            MEASURE,
        ),
    ]  # fmt: skip
