"""The metrics of a run: lines of JSON, event files of TensorBoard, and a figure of the curves."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tfla._util.files import write_atomically

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """A writer that appends to ``metrics.jsonl`` in the folder of a run.

    Records have ``kind`` "train" (one per step, with step, loss in nats per token, lr, grad_norm before clipping,
    max_input_gate, tokens_per_s of all processes, tokens_per_s_per_process, peak_memory in bytes of the process that
    has held most, elapsed in s) or "eval" (step, loss, perplexity, bits_per_byte, tokens, bytes).

    Args:
        directory: the folder of the run.
        step: the step from which the run continues. Records of later steps, and a truncated last line, are deleted.
        tensorboard: whether to write event files into ``tensorboard/`` as well.
    """

    def __init__(self, directory: Path, step: int, tensorboard: bool) -> None:
        path = directory / METRICS_FILE
        kept = (
            [json.dumps(record) + "\n" for record in read_metrics(directory) if record["step"] <= step] if step else []
        )
        write_atomically(path, lambda temporary: temporary.write_text("".join(kept)))
        self.file = open(path, "a")  # noqa: SIM115 - closed by close()
        self.events = EventFile(directory / "tensorboard", step) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record, which is then safe from a crash of the process.

        Raises:
            OSError: the disk is full.
        """
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        if self.events is not None:
            self.events.write(step, {f"{kind}/{name}": value for name, value in values.items() if value is not None})

    def sync(self) -> None:
        """Flush all records to disk, where they are safe from a crash of the machine."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the files. Errors are ignored, since :meth:`write` has flushed every record."""
        for file in (self.file, self.events):
            if file is not None:
                with suppress(OSError):
                    file.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return all records of a run in order, without a truncated last line; none if there is no file."""
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class EventFile:
    """A new event file of TensorBoard, to which scalars are appended.

    Unlike the writer of ``torch.utils.tensorboard`` it has no thread, so that a full disk raises where it is written.

    Args:
        directory: the folder of the file, created if needed. TensorBoard reads all event files in it as one run.
        step: the step from which the run continues. TensorBoard drops later values of the other files.
    """

    def __init__(self, directory: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = open(directory / name, "wb")  # noqa: SIM115 - closed by close()
        self.records = RecordWriter(self.file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append the values of a step, which are then safe from a crash of the process."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _append(self, event: Any) -> None:
        """Append an event and flush it."""
        self.records.write(event.SerializeToString())
        self.file.flush()


# The ticks of the axis of losses, in bits per byte.
TICKS = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20]
INK, TRAIN, HELDOUT = "#333333", "#7aa6c2", "#c1440e"


def plot_curves(run: Path, target: Path, *, clip: float, baselines: dict[str, float]) -> None:
    """Plot the metrics of a run: training and held-out loss, gradient norm, learning rate and input gates.

    Both losses are in bits per byte; the held-out tokens give the mean number of bytes per token for the training loss.

    Args:
        run: the folder of the run.
        target: the PNG file to write.
        clip: the norm to which gradients are clipped, drawn as a line.
        baselines: name -> bits per byte, drawn as lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

    records = read_metrics(run)
    steps = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    if not steps or not evals:
        return
    bits = evals[-1]["tokens"] / max(evals[-1]["bytes"], 1) / np.log(2)
    x = _column(steps, "step")

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, *small = (
        figure.add_subplot(cell) for grid in [figure.add_gridspec(2, 3, height_ratios=(2, 1))]
        for cell in (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2])
    )  # fmt: skip

    y = _column(steps, "loss") * bits
    loss.plot(x, y, color=TRAIN, lw=0.6, alpha=0.5)
    smooth, width = _smooth(y)
    loss.plot(x, smooth, color=TRAIN, lw=1.8, label=f"training, mean of {width} steps" if width > 1 else "training")
    heldout = _column(evals, "bits_per_byte")
    loss.plot(
        _column(evals, "step"), heldout, color=HELDOUT, lw=1.8, marker="o", ms=3.5,
        label=f"held out, {heldout[-1]:.2f} at the end",
    )  # fmt: skip
    for (name, value), dashes in zip(baselines.items(), ("--", ":", "-.") * len(baselines), strict=False):
        loss.axhline(value, color=INK, lw=1, ls=dashes, label=f"{name}, {value:.2f}")
    loss.set(ylabel="loss (bits per byte)", xlabel="step", yscale="log", xlim=(0, x[-1] * 1.01))
    loss.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    loss.yaxis.set_major_locator(FixedLocator(TICKS))
    loss.yaxis.set_minor_locator(NullLocator())
    loss.yaxis.set_major_formatter(ScalarFormatter())
    legend = loss.legend(loc="upper right", bbox_to_anchor=(1, 0.93), fancybox=False, edgecolor="none", framealpha=1)
    legend.set_zorder(5)

    small[0].plot(x, _column(steps, "grad_norm"), color=TRAIN, lw=0.6)
    small[0].axhline(clip, color=INK, lw=1, ls="--", label=f"clipped above {clip:g}")
    small[0].set(ylabel="gradient norm", yscale="log")
    small[0].legend(frameon=False, fontsize="small")
    small[1].plot(x, _column(steps, "lr"), color=TRAIN, lw=1.2)
    small[1].set(ylabel="learning rate", ylim=(0, None))
    small[1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    small[2].plot(x, _column(steps, "max_input_gate"), color=TRAIN, lw=0.6)
    small[2].set(ylabel="largest input gate\npre-activation")
    for axes in small:
        axes.set(xlabel="step", xlim=(0, x[-1] * 1.01))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for axes in (loss, *small):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#eeeeee", lw=0.8)
        axes.set_axisbelow(True)

    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(target, lambda path: path.write_bytes(picture.getvalue()))


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return one value of all records, NaN for None."""
    return np.array([np.nan if r[name] is None else r[name] for r in records], float)


def _smooth(y: np.ndarray) -> tuple[np.ndarray, int]:
    """Return centered means over a 40th of the steps, over fewer at the ends, and the number of steps in a mean."""
    width = max(1, len(y) // 40)
    box = np.ones(width)
    return np.convolve(y, box, "same") / np.convolve(np.ones(len(y)), box, "same"), width
