"""The results of small training runs, as `tfla experiment` writes them: Tables 2, 3, 5, 6 and Figures 8 to 11."""

from __future__ import annotations

from typing import Any

from tfla.paper.experiments.plans import BIASES, EPSILONS, EXPERIMENTS, Mixer, Variant
from tfla.paper.report_types import Figure, Missing, write
from tfla.paper.style import CYCLE, EXP, GREEN, MARKERS, SIG, panels
from tfla.paper.training_claims import claims
from tfla.paper.training_runs import (
    MEASURE,
    NAMES,
    SETTLED,
    SPIKE,
    TABLES,
    Config,
    Row,
    TrainingRuns,
    load,
    mean_text,
    reached,
    running_median,
    spikes,
    spread,
    title_of,
)

__all__ = ["Config", "claims", "figures"]

COMMAND = "tfla analyze training"
COLORS: dict[Mixer, str] = {"mlstm_exp": EXP, "mlstm_sig": SIG, "attention": GREEN}


def tables(config: Config, found: TrainingRuns) -> Figure:
    """Draw all tables with a dot for each run, and the numbers beside them."""
    steps = {title: reached(found, lines) for title, lines in TABLES.items()}
    present = {
        title: [line for line in TABLES[title] if found.all_of(line.variants, step=step)]
        for title, step in steps.items() if step
    }  # fmt: skip
    drawing, axes = panels(
        len(present), 1, width=8.0, height=1.0, height_ratios=[len(lines) + 1.5 for lines in present.values()]
    )
    drawing.set_size_inches(8.6, 0.32 * sum(len(lines) + 2.6 for lines in present.values()) + 0.6)
    table: list[Row] = []
    for (one,), (title, lines) in zip(axes, present.items(), strict=True):
        step = steps[title]
        for y, line in enumerate(lines):
            values = found.all_of(line.variants, step=step)
            perplexities = found.all_of(line.variants, "perplexity", step)
            one.plot(values, [y] * len(values), ls="", marker="o", color=COLORS[line.mixer], alpha=0.8)
            one.annotate(
                f"{mean_text(values)}, perplexity {mean_text(perplexities)}", (1.01, y),
                xycoords=("axes fraction", "data"), va="center", fontsize=8.5,
            )  # fmt: skip
            table += [
                {"table": title, "model": line.label, "seed": v.seed, "step": step,
                 "bits_per_byte": found.at(v, "bits_per_byte", step), "perplexity": found.at(v, "perplexity", step),
                 "parameters": found.runs[v]["parameters"]}
                for v in line.variants if found.at(v, "bits_per_byte", step) is not None
            ]  # fmt: skip
        one.set_yticks(range(len(lines)), [line.label for line in lines])
        one.set_ylim(len(lines) - 0.4, -0.6)
        one.margins(x=0.1)
        one.set_title(title_of(title, found, step), loc="left")
    axes[-1][0].set_xlabel("held-out bits per byte")
    return write(
        config, "training_tables", drawing, table,
        title="Tables 2, 3, 5 and 6: held-out text at equal size and tokens",
        caption="A dot is a run; with several seeds the number is their mean ± standard deviation. Perplexity is per "
        f"byte. {found.where}. Differences within the spread of seeds say nothing. The axes differ. Runs that ended "
        "early are compared at the last evaluation that all of them have, where the learning rate is still high.",
        command=COMMAND,
    )  # fmt: skip


def gate_biases(config: Config, found: TrainingRuns, mixer: Mixer, name: str, title: str) -> Figure:
    """Draw Figure 8 or 9: held-out text and gradient norm by the input gate's bias, learnable and fixed."""
    drawing, axes = panels(2, 2, width=5.0, height=3.2, sharex=True, sharey="row")
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
            norms = row["grad_norm"]
            below.plot(range(1, len(norms) + 1), norms, color=CYCLE[n], lw=0.6, alpha=0.45)
            below.plot(
                range(1, len(norms) + 1), running_median(norms), color=CYCLE[n], lw=1.8,
                label=f"bias {bias:g}: {len(spikes(norms))} spikes, up to {max(norms[SETTLED:], default=0):,.0f}",
            )  # fmt: skip
            table += [
                {"trainable": trainable, "bias": bias, "step": step, "grad_norm": norm}
                for step, norm in enumerate(row["grad_norm"], 1)
            ]  # fmt: skip
        above.set_title("trainable input gate" if trainable else "fixed input gate")
        if above.lines:
            above.legend()
        below.set(yscale="log", xlabel="step")
        below.axhline(found.result["config"]["optim"]["clip"], color="#333333", lw=1, ls="--", label="clipped above")
        below.legend(loc="upper right", fontsize=7.5)
    axes[0][0].set_ylabel("held-out bits per byte")
    axes[1][0].set_ylabel("gradient norm")
    return write(
        config, name, drawing, table, title=title,
        caption="The upper panels show the held-out text, with its last value in the legend. The lower panels show the "
        f"norm of the gradient before clipping (thin) and its running median (thick). A spike is a step whose norm is "
        f"above {SPIKE} times the median; spikes and largest norms are those after the first {SETTLED} steps. "
        f"{found.where}, seed 0.",
        command=COMMAND,
    )  # fmt: skip


def grid(config: Config, found: TrainingRuns) -> Figure | Missing:
    """Draw Figure 10: held-out text by norm epsilon and input gate bias."""
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
    axes.set_xticks(range(len(EPSILONS)), [f"{eps:.0e}" for eps in EPSILONS])
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


def gates_over_training(config: Config, found: TrainingRuns) -> Figure | Missing:
    """Draw Figure 11: the largest pre-activation of the input gates over training."""
    title = "Figure 11: largest input gate pre-activation over training"
    runs = [(v, found.runs[v]) for v in EXPERIMENTS["fig11"].variants if found.runs.get(v, {}).get("step")]
    if not runs:
        return Missing("fig11", title, f"no runs: `{MEASURE}`")
    drawing, [[axes]] = panels(1, 1, width=5.4, height=3.4)
    for variant, row in runs:
        axes.plot(
            row["step"], row["max_input_gate"], color=COLORS[variant.mixer], lw=1.2, alpha=0.8,
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
    """Draw the tables and figures for which the file has runs."""
    found = load(config)
    if found is None:
        why = f"no {config.results}/training.json: `{MEASURE}` trains the models"
        return [Missing("training", "Tables 2, 3, 5, 6 and Figures 8 to 11", why)]
    drawn: list[Figure | Missing] = []
    if any(reached(found, lines) for lines in TABLES.values()):
        drawn.append(tables(config, found))
    for mixer, name, number in (("mlstm_exp", "fig8", 8), ("mlstm_sig", "fig9", 9)):
        kind: Mixer = "mlstm_exp" if mixer == "mlstm_exp" else "mlstm_sig"
        title = f"Figure {number}: {NAMES[kind]} by input gate bias"
        if any(found.runs.get(v, {}).get("grad_norm") for v in EXPERIMENTS[name].variants):
            drawn.append(gate_biases(config, found, kind, name, title))
        else:
            drawn.append(Missing(name, title, f"no runs: `tfla experiment {name}`"))
    return [*drawn, grid(config, found), gates_over_training(config, found)]
