"""The figure of the model of the cost, with the measured steps on it, and the options of `tfla analyze scale`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfla._util import outputs
from tfla._util.errors import UserError
from tfla._util.options import check_count, check_range
from tfla.nn import ModelConfig
from tfla.paper import style
from tfla.paper.report_types import Figure, Missing, Options, write
from tfla.paper.scale import page
from tfla.paper.scale.costs import Cost, Layout, Link, Work, best_layout
from tfla.paper.scale.measured import NETWORK, Measured, read

COMMAND = "tfla analyze scale"
NAME, TITLE = "scale", "Training on 1 to 1,024 GPUs: a model of the cost"
MODELS = ("1.4B", "7B")
LENGTHS = (2**13, 2**17, 2**20, 2**24)
GPUS = tuple(2**n for n in range(11))
COLORS = dict(zip(LENGTHS, (style.BLUE, style.GREEN, style.ORANGE, style.RED), strict=True))
PARTS = {
    "compute": ("computation", style.SKY), "optimizer": ("AdamW", style.GREY), "fsdp": ("FSDP", style.PURPLE),
    "cp": ("context parallel", style.RED), "tp": ("tensor parallel", style.YELLOW),
}  # fmt: skip


@dataclass
class Config(Options):
    """The options of `tfla analyze scale`: the time and memory of training steps, from one GPU to many."""

    tokens: int = 2**22
    """Tokens of a batch; a longer sequence is a batch alone."""
    per_node: int = 8
    """GPUs of a node."""
    inside_seconds: float | None = None
    """Latency of the link in a node; None is the measured one, or else 10 µs."""
    inside_bandwidth: float | None = None
    """Byte/s of a GPU in a node, in one direction; None is the measured one, or else 450e9."""
    between_seconds: float = NETWORK.seconds
    """Latency of the link between nodes."""
    between_bandwidth: float = NETWORK.bytes_per_second
    """Byte/s of a GPU between nodes, in one direction."""
    page: Path | None = None
    """Write the page about the model here, with its figure in the folder img beside it."""

    def check(self) -> None:
        """Raise UserError where an option does not fit, or a file cannot be written."""
        super().check()
        check_count("tokens", self.tokens)
        check_count("per_node", self.per_node)
        for name in ("inside_seconds", "inside_bandwidth", "between_seconds", "between_bandwidth"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, with_low=name.endswith("seconds"))
        if (self.inside_seconds is None) != (self.inside_bandwidth is None):
            raise UserError("inside_seconds, inside_bandwidth: got one of them, expected both or neither")
        if self.page is not None:
            outputs.check_file("page", self.page)

    def measured(self) -> Measured:
        """Return the measurements, and the GPUs of the options."""
        inside = None
        if self.inside_seconds is not None and self.inside_bandwidth is not None:
            inside = Link(self.inside_seconds, self.inside_bandwidth)
        between = Link(self.between_seconds, self.between_bandwidth)
        return read(self.results, inside, between, self.per_node)


class Forecast(NamedTuple):
    """The fastest layout of a model, a length and a number of GPUs, and its cost."""

    model: str
    work: Work
    gpus: int
    layout: Layout
    cost: Cost

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all GPUs."""
        return self.work.tokens / self.cost.seconds


def forecasts(config: Config, found: Measured) -> list[Forecast]:
    """Return the forecasts of all models, lengths and numbers of GPUs that have the memory."""
    every = []
    for model in MODELS:
        for T in LENGTHS:
            work = Work(ModelConfig.named(model), T, max(1, config.tokens // T))
            for gpus in GPUS:
                best = best_layout(work, gpus, found.cluster)
                if best is not None:
                    every.append(Forecast(model, work, gpus, *best))
    return every


def draw(every: list[Forecast], found: Measured) -> tuple[Any, list[dict[str, Any]]]:
    """Return the figure and its numbers."""
    drawing, axes = style.panels(len(MODELS), 3, width=4.3, height=3.2)
    for row, model in zip(axes, MODELS, strict=True):
        speed, memory, shares = row
        for T, color in COLORS.items():
            line = [f for f in every if (f.model, f.work.T) == (model, T)]
            xs = [f.gpus for f in line]
            look: dict[str, Any] = {"color": color, "marker": ".", "label": f"T {T:,}"}
            speed.plot(xs, [f.tokens_per_second / f.gpus / 1e3 for f in line], **look)
            memory.plot(xs, [f.cost.memory / 2**30 for f in line], **look)
        points = [p for p in found.points if model == MODELS[0]]
        look = {"ls": "", "marker": "D", "color": style.INK, "ms": 5, "label": "measured"}
        if points:
            rates = [p.work.tokens / p.seconds / p.gpus / 1e3 for p in points]
            speed.plot([p.gpus for p in points], rates, **look)
        weighed = [p for p in points if p.memory is not None]
        if weighed:
            memory.plot([p.gpus for p in weighed], [(p.memory or 0) / 2**30 for p in weighed], **look)
        memory.axhline(found.cluster.memory_bytes / 2**30, color=style.GREY, ls=":")
        bars = [f for f in every if (f.model, f.gpus) == (model, GPUS[-1])]
        below = [0.0] * len(bars)
        for part, (label, color) in PARTS.items():
            values = [100 * getattr(f.cost, part) / f.cost.seconds for f in bars]
            shares.bar([f"{f.work.T:,}" for f in bars], values, bottom=below, color=color, label=label)
            below = [a + b for a, b in zip(below, values, strict=True)]
        speed.set(title=f"{model}: thousand tokens per second and GPU", ylim=(0, None))
        memory.set(title=f"{model}: memory of a GPU, GiB", ylim=(0, None))
        shares.set(title=f"{model}: % of a step on {GPUS[-1]:,} GPUs, by T", ylim=(0, 100))
        shares.grid(False, axis="x")
        for one in (speed, memory):
            style.power_of_two_axis(one, GPUS[::2], "GPUs")
    style.legend_beside(drawing, axes[0][0], axes[0][2])
    numbers: list[dict[str, Any]] = [
        {
            "what": "model", "model": f.model, "T": f.work.T, "sequences": f.work.sequences, "GPUs": f.gpus,
            **{n: getattr(f.layout, n) for n in ("dp_shard", "cp", "tp", "passes", "checkpointing")},
            "seconds": f.cost.seconds, **{part: getattr(f.cost, part) for part in PARTS},
            "tokens per second": f.tokens_per_second, "bytes": f.cost.memory,
        }
        for f in every
    ]  # fmt: skip
    numbers += [
        {
            "what": "measured", "model": "1.4B", "T": p.work.T, "sequences": p.work.sequences, "GPUs": p.gpus,
            **{n: getattr(p.layout, n) for n in ("dp_shard", "cp", "tp", "passes", "checkpointing")},
            "seconds": p.seconds, "tokens per second": p.work.tokens / p.seconds, "bytes": p.memory,
        }
        for p in found.points
    ]  # fmt: skip
    return drawing, numbers


def figures(config: Config) -> list[Figure | Missing]:
    """Draw the figure, and write the page where the options name one."""
    try:
        found = config.measured()
    except UserError as error:
        return [Missing(NAME, TITLE, str(error))]
    every = forecasts(config, found)
    drawing, numbers = draw(every, found)
    figure = write(
        config, NAME, drawing, numbers, title=TITLE, command=COMMAND,
        caption=f"""The fastest layout (dp_shard × cp × tp) that fits into the memory of a {found.cluster.name}, for
batches of {config.tokens:,} tokens, or one sequence where it is longer. One GPU computes at the rate that was measured
({found.source}); communication takes a latency and a bandwidth for each link. Diamonds are measured steps.

A line ends on the left where no layout fits. It falls where the backward computes blocks again to save memory, and on
the right where little is left to compute beside what is sent: weights and gradients for many short parts, states for
many parts of one sequence.""",
    )  # fmt: skip
    if config.page is not None:
        image = config.page.parent / "img" / f"{NAME}.{config.format}"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(figure.path.read_bytes())
        link = Path(os.path.relpath(image, config.page.parent)).as_posix()
        page.write(config.page, link, every, found, config.tokens, config.between_seconds, config.between_bandwidth)
    return [figure]
