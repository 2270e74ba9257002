"""What small training runs found: Tables 2, 3, 5 and 6, Figures 8 to 11, from the file that `tfla experiment` wrote."""

from __future__ import annotations

import json
import math
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
    table: list[Row] = []
    for (one,), (title, lines) in zip(axes, present.items(), strict=True):
        for y, line in enumerate(lines):
            values = found.all_of(line.variants)
            perplexities = found.all_of(line.variants, "perplexity")
            one.plot(values, [y] * len(values), ls="", marker="o", color=COLORS[line.mixer], alpha=0.8)
            one.annotate(
                f"{text(values)}, perplexity {text(perplexities)}", (1.01, y), xycoords=("axes fraction", "data"),
                va="center", fontsize=8.5,
            )  # fmt: skip
            table += [
                {"table": title, "model": line.label, "seed": v.seed, "bits_per_byte": found.last(v, "bits_per_byte"),
                 "perplexity": found.last(v, "perplexity"), "parameters": found.runs[v]["parameters"]}
                for v in line.variants if found.trained(v) is not None
            ]  # fmt: skip
        one.set_yticks(range(len(lines)), [line.label for line in lines])
        one.set_ylim(len(lines) - 0.4, -0.6)
        one.set_title(title, loc="left")
    axes[-1][0].set_xlabel("held-out bits per byte")
    return write(
        config, "training_tables", drawing, table,
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
    table: list[Row] = []
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
            table += [
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
        config, name, drawing, table, title=title,
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
    table = [
        {"model": NAMES[v.mixer], "seed": v.seed, "step": step, "max_input_gate": i}
        for v, row in runs for step, i in zip(row["step"], row["max_input_gate"], strict=True)
    ]  # fmt: skip
    return write(
        config, "fig11", drawing, table, title=title, command=COMMAND,
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


def peak(found: Found, variant: Variant) -> float:
    """The largest gradient norm of a run, nan without one."""
    row = found.trained(variant)
    return max(row["grad_norm"]) if row is not None else float("nan")


def verdict(holds: bool) -> str:
    return "it reproduces" if holds else "it does not reproduce at this size"


def numbers(values: Iterable[float], digits: str = ".3f") -> str:
    """Several of them with commas, what is not there as a dash."""
    return ", ".join("-" if math.isnan(x) else f"{x:{digits}}" for x in values)


def claims(config: Config) -> list[Claim]:
    """What the paper's training experiments say, beside the small ones."""
    found = load(Config(out=config.out, results=config.results))
    if found is None:
        return []
    return [_equal_gates(found), _attention(found), _learnable(found), _biases(found), _grid(found), _below_zero(found),
            _unfinished(found)]  # fmt: skip


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _equal_gates(found: Found) -> Claim:
    exp, sig = (found.all_of(_seeds(Variant(m))) for m in MLSTMS)
    four = [found.all_of([Variant(m, heads=4)]) for m in MLSTMS]
    close = bool(exp and sig) and abs(statistics.mean(exp) - statistics.mean(sig)) < 2 * max(spread(found), 1e-9)
    return Claim(
        "mLSTMsig learns as well as mLSTMexp",
        "that mLSTMsig performs equally well: perplexity 21.03 and 21.03 at 160M parameters with 6 heads (Table 2).",
        f"{verdict(close)}: {text(exp)} and {text(sig)} held-out bits per byte for mLSTMexp and mLSTMsig with 2 heads, "
        f"{len(exp)} seeds; {text(four[0])} and {text(four[1])} with 4 heads, one seed. {found.where}.",
        MEASURE,
    )


def _attention(found: Found) -> Claim:
    at = {heads: [text(found.all_of(_seeds(Variant(m, heads=heads)))) for m in ("attention", "mlstm_exp")]
          for heads in (2, 4)}  # fmt: skip
    return Claim(
        "mLSTM and Llama at equal size",
        "that both are about equal: 20.89 for Llama, 21.03 to 21.18 for the mLSTMs at 160M (Table 2).",
        f"not comparable at this size: attention in the same block has {at[2][0]} bits per byte beside mLSTMexp's "
        f"{at[2][1]} with 2 heads, {at[4][0]} beside {at[4][1]} with 4. So short a training on bytes favours "
        "the recurrent model; it says nothing on trained ones.",
        MEASURE,
    )


def _learnable(found: Found) -> Claim:
    pairs = [[_nan(found.last(Variant(m, trainable=t), "bits_per_byte")) for t in (True, False)] for m in MLSTMS]
    return Claim(
        "A learnable input gate",
        "that learning the input gate improves perplexity: 20.95 against 21.23 for mLSTMexp, 21.04 against 21.24 for "
        "mLSTMsig (Table 6).",
        f"{verdict(all(learnt < fixed for learnt, fixed in pairs))}: {numbers(pairs[0])} bits per byte learnable and "
        f"fixed for mLSTMexp, {numbers(pairs[1])} for mLSTMsig, one seed each; the standard deviation over seeds is "
        f"{spread(found):.3f}.",
        "tfla experiment table6 --size small",
    )


def _biases(found: Found) -> Claim:
    variants = {m: [Variant(m, bias=bias) for bias in BIASES] for m in MLSTMS}
    norms = {m: [peak(found, v) for v in line] for m, line in variants.items()}
    bits = {m: [_nan(found.last(v, "bits_per_byte")) for v in line] for m, line in variants.items()}
    calm = norms["mlstm_exp"][-1] < min(norms["mlstm_exp"][:-1])
    return Claim(
        "The input gate's bias at the start",
        "that a bias of -10 prevents the gradient norm's spikes and high variance that biases of 0, -2 and -5 have "
        "(Figures 8 and 9).",
        f"for mLSTMexp {verdict(calm)}: the largest gradient norm is {numbers(norms['mlstm_exp'], '.0f')} for biases "
        f"0, -2, -5, -10 and held-out bits per byte {numbers(bits['mlstm_exp'])}. For mLSTMsig the norms are "
        f"{numbers(norms['mlstm_sig'], '.0f')}, bits per byte {numbers(bits['mlstm_sig'])}. One seed each, no run "
        "diverged; spikes are rare events, so single norms say little.",
        "tfla experiment fig8 --size small",
    )


def _grid(found: Found) -> Claim:
    at = {(eps, bias): _nan(found.last(Variant("mlstm_exp", eps=eps, bias=bias), "bits_per_byte"))
          for eps in EPSILONS for bias in BIASES}  # fmt: skip
    best = {eps: min(BIASES, key=lambda bias: at[eps, bias] if at[eps, bias] == at[eps, bias] else 99.0)
            for eps in EPSILONS}  # fmt: skip
    rising = [best[eps] for eps in sorted(EPSILONS)]
    lines = "; ".join(f"ε = {eps:g}: {numbers(at[eps, bias] for bias in BIASES)}" for eps in sorted(EPSILONS))
    return Claim(
        "Norm epsilon and bias belong together",
        "that the best of the grid lie on a diagonal from (1e-6, -10) to (1e-4, -5): a larger epsilon wants a larger "
        "bias (Figure 10).",
        f"{verdict(rising == sorted(rising) and rising[0] < rising[-1])}: the best bias is "
        + ", ".join(f"{best[eps]:g} for ε = {eps:g}" for eps in sorted(EPSILONS))
        + f". Bits per byte for biases 0, -2, -5, -10: {lines}. One seed each, standard deviation {spread(found):.3f}.",
        "tfla experiment fig10 --size small",
    )


def _below_zero(found: Found) -> Claim:
    rows = {v: row for v in EXPERIMENTS["fig11"].variants if (row := found.trained(v)) is not None}
    largest = [max(x for x in row["max_input_gate"] if x is not None) for row in rows.values()]
    ends = [row["max_input_gate"][-1] for row in rows.values()]
    return Claim(
        "Input gates stay below zero",
        "that pre-activations grow slowly from the bias of -10 and mostly stay below 0 (Figure 11).",
        f"{verdict(bool(largest) and max(largest) < 0)}: the largest of {len(rows)} runs is "
        f"{max(largest, default=0):.1f}, and runs end between {min(ends, default=0):.1f} and "
        f"{max(ends, default=0):.1f}.",
        "tfla experiment fig11 --size small",
    )


def _unfinished(found: Found) -> Claim:
    missing = [name for name in ("table3", "table5") if not all(map(found.trained, EXPERIMENTS[name].variants))]
    what = {"table3": "native PyTorch against kernels (Table 3)", "table5": "longer contexts (Table 5)"}
    said = " and ".join(what[name] for name in missing)
    return Claim(
        "Kernels and contexts",
        "that kernels train as the parallel form in JAX does (Table 3), and the same at twice the context (Table 5).",
        (f"not finished at this size: {said}; the committed file has the steps they took. " if missing else "")
        + "At the smoke size both run on a CPU in minutes. That backends agree is tested on every gradient instead.",
        "tfla experiment table3 --size smoke",
    )
