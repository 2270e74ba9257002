"""`tfla experiment NAME`: trains the runs of an experiment that are not finished, then writes what they found."""

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
    """Train small models as the paper's figures and tables have them. Stopped at any moment, the same command goes on.

    "smoke" takes minutes on a CPU and shows that everything runs; "small" takes minutes on one GPU.
    """

    size: Literal["smoke", "small"] = "smoke"
    """Of the models and of the runs."""
    folder: Path = Path("runs/experiments")
    """The runs are in a folder of it for each size; a model that two experiments have is trained once."""
    device: str = "auto"
    """auto is the GPU if there is one."""
    processes: int | None = None
    """Runs at once; None: one a core, up to 16, on a GPU, half of the cores on a CPU."""
    budget: float | None = None
    """Seconds after which the runs save where they are and end."""
    out: Path | None = None
    """JSON file for what was found, from which `tfla analyze training` draws; None: training.json beside the runs."""

    def check(self) -> None:
        """Raise UserError where a value is out of range, or what is found cannot be written."""
        if self.processes is not None:
            check_count("processes", self.processes, 1, MOST)
        if self.budget is not None:
            check_range("budget", self.budget, 0, with_low=False)
        outputs.check_folder("folder", self.folder)
        if self.out is not None:
            outputs.check_file("out", self.out)


def run(name: str, config: ExperimentConfig) -> Path:
    """Runs one experiment, or all; returns the file with what the runs of this size have found so far.

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
    wanted = configure(unique(v for e in chosen.values() for v in e.at(size)))
    tokens = folder / "tokens"
    text = prepare_tokens(wanted[0][1].data, tokens)
    say(f"{name}, {config.size}: {len(wanted)} models of {size.steps} steps on {device}")
    say(f"{len(text.train):,} bytes to train on, {len(text.heldout):,} held out; runs in {folder}")
    left = train_all(
        [c for _, c in wanted], tokens, config.processes or default_processes(device), config.budget, say
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
    """JSON with a line for each run."""
    head = json.dumps({name: value for name, value in found.items() if name != "runs"}, indent=1)
    runs = ",\n".join(f"  {json.dumps(row)}" for row in found["runs"])
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
