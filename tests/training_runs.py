"""Runs of `tfla train` on several processes, which tests compare with each other."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import free_ports, start

from tfla._util.errors import UserError
from tfla.nn import LanguageModel
from tfla.train import loop
from tfla.train.config import Data, Model, Optim, TrainConfig
from tfla.train.logging import read_metrics
from tfla.train.pending import PendingStep, StepNumbers

WORDS = ["state", "gate", "chunk", "tile", "query", "key", "value", "forget", "input", "norm", "scale", "head", "loss"]


STEPS = 4


class Job(NamedTuple):
    """A run on several processes."""

    config: TrainConfig
    copy: tuple[Path, int] | None = None
    """A run that it continues, and the step from which it does."""
    full_disk: bool = False
    """Whether the files of process 2 cannot grow after the first checkpoint."""
    signal_after: int | None = None
    """The step after whose numbers process 1 catches a signal, while the next step is computed."""


def make_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "run": folder / name,
        "data": Data(paths=(folder / "texts",), heldout=0.2),
        "model": Model(d_model=32, num_blocks=2, num_heads=2),
        "optim": Optim(warmup_steps=2, cooldown_steps=2),
        "steps": STEPS,
        "batch_size": 8,
        "context": 24,
        "eval_every": 3,
        "eval_windows": 7,  # no multiple of the processes
        "checkpoint_every": 2,
        "keep_last": 3,
        "tensorboard": False,
        "device": "cpu",
    }
    return TrainConfig(**fields | changes)


def copy_run(source: Path, target: Path, step: int) -> Path:
    """Copy a run as it was after a step, and return the folder."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    return target


def set_rank(rank: int, count: int, port: int) -> None:
    """Set the variables of torchrun for this process, one of several on this machine."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def run_jobs(count: int, jobs: list[Job], folder: Path) -> None:
    """Train all jobs on ``count`` processes. Errors are written to files: error-0, error-1 and so on."""
    start(count, _run_jobs, count, jobs, free_ports(len(jobs)), folder)


def _run_jobs(rank: int, count: int, jobs: list[Job], ports: list[int], folder: Path) -> None:
    """Train all jobs as one of the processes."""
    torch.set_num_threads(1)
    for job, port in zip(jobs, ports, strict=True):
        set_rank(rank, count, port)
        if rank == 0 and job.copy is not None:
            copy_run(job.copy[0], job.config.run, job.copy[1])
        if rank == 2 and job.full_disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))
        if not job.full_disk:
            with pytest.MonkeyPatch.context() as patch:
                if job is not jobs[0]:
                    patch.setattr(loop, "plot_curves", _no_figure)  # it takes as long as two steps on four processes
                if rank == 1 and job.signal_after is not None:
                    patch.setattr(PendingStep, "read", _signal_after(job.signal_after))
                trained = loop.train(job.config)
            if job.signal_after is not None:
                (folder / f"stopped-{rank}").write_text(f"{trained.step} {trained.signal}")
            continue
        with pytest.raises(UserError) as raised:
            loop.train(job.config)
        (folder / f"error-{rank}").write_text(str(raised.value))
        os._exit(0)  # as the command ends a process whose group has failed: see end_process_of_group


def _no_figure(*args: Any, **options: Any) -> None:
    """Draw no curves."""


def _signal_after(step: int) -> Callable[..., StepNumbers]:
    """Return the reading of a step that sends this process a signal once it has read the numbers of one step."""
    read = PendingStep.read

    def read_and_stop(self: PendingStep, *args: Any) -> StepNumbers:
        numbers = read(self, *args)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return numbers

    return read_and_stop


def write_texts(folder: Path) -> None:
    """Write the texts of all runs into a folder."""
    (folder / "texts").mkdir()
    draw = random.Random(0)
    for number in range(30):
        text = " ".join(draw.choice(WORDS) for _ in range(40))
        (folder / "texts" / f"{number:02d}.txt").write_text(text + "\n")


def curve(run: Path) -> dict[tuple[str, int], list[float]]:
    """Return what a run has measured, by kind and step."""
    return {
        (r["kind"], r["step"]): [
            r[name] for name in ("loss", "grad_norm", "max_input_gate", "bits_per_byte") if r.get(name) is not None
        ]
        for r in read_metrics(run)
    }


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    return LanguageModel.from_pretrained(run / "checkpoints" / f"step-{step:08d}").state_dict()
