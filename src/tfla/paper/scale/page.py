"""The page that `tfla analyze scale --page` writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tfla._util.files import write_atomically
from tfla._util.markdown import table
from tfla.paper.scale.costs import Layout
from tfla.paper.scale.measured import Measured

SHOWN = (8, 64, 256, 1024)
LARGE = 0.95  # the share of a step from which on the rest is not named
REASONS = {
    "again": "the backward computes blocks and logits again, so that a step fits into the memory",
    "FSDP": "gathering weights and scattering gradients takes longer than the computation that it overlaps with, and "
    "FSDP2 copies both between buffers",
    "cp": "every GPU receives the states of all parts, so that they grow with the number of parts while each part's "
    "computation shrinks; a scan over the parts, which sends one state on, would not",
    "tp": "the residual stream is summed over the GPUs that share heads",
    "AdamW": "the optimizer passes over weights, gradients and moments",
}
INTRO = """# Many GPUs

This page says what training costs on more GPUs than could be measured: a model with a few numbers, checked against one
and two GPUs. `tfla analyze scale --page docs/scale.md` writes it."""
MODEL = """## The model

The cost of a step is the sum of what follows. [Several GPUs](distributed.md) says what each layout does.

- **Computation.** The FLOPs of a GPU's tokens, forward and backward, at the rate of one GPU. Smaller matrix products
  are taken to be as fast as large ones.
- **AdamW.** Eight passes over a GPU's share of weights, gradients and moments at the rate of a device copy.
- **FSDP** over dp_shard × cp GPUs. The weights of a block in float32 are gathered before its forward and before its
  backward, and its gradients scattered. The next block's weights arrive while a block computes, so that only the rest
  counts. FSDP2 copies gathered weights out of a buffer, and gradients into one, in the stream of the computation: each
  copy is a read and a write at the rate of a device copy.
- **Context parallelism.** One all_gather of the states of all parts in each block, forward and backward: from each GPU
  about dqk · dhv numbers for a head and sequence, whatever the length. The exponential gate has two each way: in the
  forward max states come first, two numbers for a head, and in the backward the cotangents of n follow those of C, dqk
  numbers. With a single one in the backward two GPUs were slower: 1.54 times as fast as one GPU, not 1.73, with forward
  and backward at 65,536 steps. Nothing overlaps with them.
- **Tensor parallelism**, within a node. Two sums of the residual stream in each block, forward and backward.
- **Memory.** Weights, gradients and moments in float32, divided by all GPUs; two gathered blocks; and what a GPU's
  tokens save for the backward, as `tfla train` estimates it.
- **Left out**: the time in which a GPU waits for the host, above all between the backward and the next forward, and the
  multiprocessors that NCCL's kernels take from the computation while they send. The
  [tuning log](tuning-log-models.md#several-gpus-a-training-step-of-the-14b) says what they come to in the step of FSDP
  below.

An all_gather of B bytes over n GPUs takes its latency log2 n times, and (n - 1) / n · B at the bandwidth of a GPU.
Where a group spans nodes, all its GPUs of a node share their links. The layout is the fastest that fits: dp_shard, cp
and tp that multiply to the number of GPUs, with and without activation checkpointing, in as few passes as the memory
allows."""
MEASURED = """## Measured

Training steps of the 1.4B, and what the model says of them. One step of one GPU sets the rate; the others test it."""
FORECASTS = """## Forecasts

Seconds of a step, tokens per second of all GPUs and memory of a GPU. Passes are gradient accumulation; "again" means
activation checkpointing."""
LINEAR = """## Where it stops being linear

The time that the computation alone would take, without any of it again, in percent of the step; and what takes most of
the rest."""


def number(x: float) -> str:
    """Return a number with three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def layout_text(layout: Layout) -> str:
    """Return a layout as text: its sizes that are not 1."""
    sizes = [(name, getattr(layout, name)) for name in ("dp_shard", "cp", "tp")]
    text = " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one GPU"
    text += f", {layout.passes} passes" if layout.passes > 1 else ""
    return text + (", again" if layout.checkpointing else "")


def limit(forecast: Any, flops: float) -> tuple[float, str]:
    """Return the share of a step that its computation takes, recomputation apart, and what takes most of the rest.

    Args:
        forecast: the layout and its cost.
        flops: the rate of one GPU.
    """
    cost, work = forecast.cost, forecast.work
    (forward, backward), ends = work.flops()
    alone = work.tokens * (work.config.num_blocks * (forward + backward) + sum(ends)) / (flops * forecast.gpus)
    rest = {
        "again": cost.compute - alone, "FSDP": cost.fsdp, "cp": cost.cp, "tp": cost.tp, "AdamW": cost.optimizer
    }  # fmt: skip
    return alone / cost.seconds, max(rest, key=lambda name: rest[name])


def limits(every: Sequence[Any], flops: float) -> str:
    """Return the table of the shares by model, length and number of GPUs, and what its words mean."""
    rows, reasons = [], list[str]()
    numbers = sorted({f.gpus for f in every})[::2]
    for (model, T), group in groupby(every, key=lambda f: (f.model, f.work.T)):
        cells = dict.fromkeys(numbers, "-")
        for forecast in group:
            if forecast.gpus in cells:
                share, reason = limit(forecast, flops)
                cells[forecast.gpus] = f"{share:.0%}, {reason}" if share < LARGE else f"{share:.0%}"
                reasons += [reason] if share < LARGE else []
        rows.append([f"{model}, {T:,}", *cells.values()])
    words = [f"- {name}: {text}." for name, text in REASONS.items() if name in reasons]
    return table(["model, T", *(f"{n:,}" for n in numbers)], rows) + "\n\n" + "\n".join(words)


def write(
    target: Path, image: str, every: Sequence[Any], found: Measured, tokens: int, seconds: float, bandwidth: float
) -> None:
    """Write the page.

    Args:
        target: the file.
        image: the link to the figure.
        every: the forecasts, in the order of model, length and number of GPUs.
        found: the measurements.
        tokens: the tokens of a batch.
        seconds: the latency between nodes.
        bandwidth: the bandwidth between nodes.
    """
    c = found.cluster
    numbers = table(
        ["number", "value", "from"],
        [
            ["rate of a GPU", f"{c.flops / 1e12:,.0f} TFLOP/s", found.source],
            ["device copy", f"{c.memory_rate / 1e12:.2f} TB/s", "the same run"],
            ["memory of a GPU", f"{c.memory_bytes / 2**30:,.0f} GiB, of which a step may take 90 %", c.name],
            ["link in a node", _link(c.inside.seconds, c.inside.bytes_per_second), found.link_source],
            ["link between nodes", _link(seconds, bandwidth), "400 Gbit/s for each GPU"],
            ["GPUs of a node", str(c.per_node), ""],
            ["tokens of a batch", f"{tokens:,}", "a longer sequence is a batch alone"],
        ],
    )
    parts = [INTRO, f"![Tokens per second, memory and shares of the time]({image})", MODEL, numbers, MEASURED]
    rows = [
        [
            p.name, f"{p.work.T:,} × {p.work.sequences}", layout_text(p.layout), f"{p.seconds:.3f}",
            f"{p.expected.seconds:.3f}", f"{p.expected.seconds / p.seconds:.2f}",
            "-" if p.memory is None else f"{p.memory / 2**30:.0f}", f"{p.expected.memory / 2**30:.0f}",
        ]
        for p in found.points
    ]  # fmt: skip
    head = ["", "T × sequences", "layout", "measured, s", "model, s", "ratio", "measured, GiB", "model, GiB"]
    parts.append(table(head, rows))
    if found.exchanges:
        parts.append("The operator alone, with its steps shared:")
        parts.append(
            table(
                ["", "T", "direction", "GPUs", "one GPU, ms", "measured, ms", "ratio", "model, ms"],
                [
                    [
                        e.name,
                        f"{e.T:,}",
                        e.direction,
                        str(e.gpus),
                        f"{e.one * 1e3:.2f}",
                        f"{e.several * 1e3:.2f}",
                        f"{e.one / e.several:.2f}",
                        f"{e.expected * 1e3:.2f}",
                    ]
                    for e in found.exchanges
                ],
            )
        )
    parts.append(FORECASTS)
    for model, group in groupby(every, key=lambda f: f.model):
        rows = [
            [
                f"{f.work.T:,}", f"{f.gpus:,}", layout_text(f.layout), number(f.cost.seconds),
                f"{f.tokens_per_second / 1e3:,.0f}", f"{f.cost.memory / 2**30:.0f}",
            ]
            for f in group if f.gpus in SHOWN
        ]  # fmt: skip
        parts.append(table([f"{model}, T", "GPUs", "layout", "s", "thousand tokens/s", "GiB"], rows))
    parts += [LINEAR, limits(every, c.flops)]
    whole = "\n\n".join(parts) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda path: path.write_text(whole, encoding="utf-8"))


def _link(seconds: float, bandwidth: float) -> str:
    """Return the numbers of a link as text."""
    return f"{seconds * 1e6:.0f} µs, {bandwidth / 1e9:,.0f} GB/s"
