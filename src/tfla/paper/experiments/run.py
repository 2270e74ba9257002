"""The training of an experiment's unfinished runs, and the file of their results (`tfla experiment NAME`)."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tfla._util import outputs
from tfla._util.device import pick_device
from tfla._util.errors import UserError
from tfla._util.files import write_atomically
from tfla._util.options import check_count, check_range
from tfla.measure.machine import environment
from tfla.paper.experiments.outcome import outcome
from tfla.paper.experiments.plans import EXPERIMENTS, SIZES, Variant, unique
from tfla.paper.experiments.worker_pool import default_processes, say, train_all
from tfla.train.config import TrainConfig, to_json
from tfla.train.data import prepare_tokens

ALL = "all"
MOST = 1024  # processes


@dataclass(frozen=True)
class ExperimentConfig:
    """Train small versions of the paper's models. After an interruption, the same command continues.

    The size "smoke" takes minutes on a CPU and shows that everything runs; "small" takes minutes on one GPU.
    """

    size: Literal["smoke", "small"] = "smoke"
    """The size of the models and of the runs."""
    folder: Path = Path("runs/experiments")
    """The folder of the runs, with a folder for each size; a model of two experiments is trained once."""
    device: str = "auto"
    """The device; auto is the GPU if there is one."""
    processes: int | None = None
    """The number of runs at once; None is one a core, up to 16, on a GPU, and half of the cores on a CPU."""
    budget: float | None = None
    """The seconds after which the runs save a checkpoint and end."""
    out: Path | None = None
    """The JSON file of the results, which `tfla analyze training` reads; None is training.json beside the runs."""

    def check(self) -> None:
        """Raise UserError where a value is out of range, or the results cannot be written."""
        if self.processes is not None:
            check_count("processes", self.processes, 1, MOST)
        if self.budget is not None:
            check_range("budget", self.budget, 0, with_low=False)
        outputs.check_folder("folder", self.folder)
        if self.out is not None:
            outputs.check_file("out", self.out)


def run(name: str, config: ExperimentConfig) -> Path:
    """Run one experiment, or all; return the file with the results of all runs of this size so far.

    Raises:
        UserError: there is no such experiment or device, or the options do not fit.
    """
    if name != ALL and name not in EXPERIMENTS:
        raise UserError(f"experiment: got {name!r}, allowed are {', '.join([*EXPERIMENTS, ALL])}")
    config.check()
    device, size = str(pick_device(config.device)), SIZES[config.size]
    folder = config.folder / config.size
    folder.mkdir(parents=True, exist_ok=True)

    def configure(variants: list[Variant]) -> list[tuple[Variant, TrainConfig]]:
        return [(v, v.config(size, folder, device)) for v in variants]

    chosen = EXPERIMENTS if name == ALL else {name: EXPERIMENTS[name]}
    runs = configure(unique(v for e in chosen.values() for v in e.at(size)))
    tokens = folder / "tokens"
    text = prepare_tokens(runs[0][1].data, tokens)
    say(f"{name}, {config.size}: {len(runs)} models of {size.steps} steps on {device}")
    say(f"{len(text.train):,} bytes to train on, {len(text.heldout):,} held out; runs in {folder}")
    left = train_all(
        [c for _, c in runs], tokens, config.processes or default_processes(device), config.budget, say
    )  # fmt: skip
    if left:
        say(f"{left} runs are not finished; the same command goes on with them")
    every = configure(unique(v for e in EXPERIMENTS.values() for v in e.at(size)))
    base = Variant("mlstm_exp").config(size, ExperimentConfig.folder / config.size, device)
    found: dict[str, Any] = {
        "kind": "training", "environment": environment(device) | {"python": platform.python_version()},
        "size": {"name": config.size, **asdict(size)}, "config": json.loads(to_json(base)),
        "train_bytes": len(text.train), "heldout_bytes": len(text.heldout),
        "runs": [outcome(v, c) for v, c in every if c.run.exists()],
    }  # fmt: skip
    target = config.out or folder / "training.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda path: path.write_text(compact(found)))
    return target


def compact(found: dict[str, Any]) -> str:
    """Return the results as JSON with a line for each run."""
    head = json.dumps({name: value for name, value in found.items() if name != "runs"}, indent=1)
    runs = ",\n".join(f"  {json.dumps(row)}" for row in found["runs"])
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
