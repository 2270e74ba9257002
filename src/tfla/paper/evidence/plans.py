"""The experiments as data: their tasks, models and sizes. Runs stand in the order in which they are trained."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tfla.paper.evidence.models import MODELS, Shape
from tfla.paper.evidence.needle import Needle
from tfla.paper.evidence.recall import Recall
from tfla.paper.evidence.text import Text
from tfla.paper.evidence.tracking import Tracking
from tfla.paper.evidence.training import Precision, Run
from tfla.train.config import Data

SizeName = Literal["smoke", "full"]
REFLECTING = ("delta_net_2", "gated_delta_net_2", "kda_2")  # whose steps can reverse the sign of what is stored
PLAIN = tuple(name for name in MODELS if name not in REFLECTING)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Size:
    """The runs of an experiment: every task and shape, with every learning rate, seed and model."""

    tasks: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    models: tuple[str, ...]
    lrs: tuple[float, ...]
    """Learning rates, the first of which is trained first."""
    seeds: tuple[int, ...]
    batch_size: int
    steps: int
    sequences: int
    """Sequences of each kind on which a model is measured."""
    precision: Precision = "float32"

    def runs(self) -> Iterator[Run]:
        """Yield the runs, first those of the first learning rate for each seed in turn."""
        for lr in self.lrs:
            for seed in self.seeds:
                for task in self.tasks:
                    for shape in self.shapes:
                        for model in self.models:
                            yield Run(
                                model=model, task=task, shape=shape, batch_size=self.batch_size, steps=self.steps,
                                lr=lr, seed=seed, sequences=self.sequences, precision=self.precision,
                            )  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A question to all models, at both sizes."""

    title: str
    smoke: Size
    full: Size
    timed: bool = False
    """Whether the speeds of models are compared, so that all runs are of one device."""

    def size(self, name: SizeName) -> Size:
        """Return one of the sizes."""
        return self.smoke if name == "smoke" else self.full


SMALL = Shape(d_model=32, state_dim=16)
EXPERIMENTS = {
    "recall": Experiment(
        "multi-query associative recall, by pairs and size of the state",
        smoke=Size(
            tasks=(Recall(keys=32, pairs=(2, 4, 8), length=32),),
            shapes=(SMALL, Shape(d_model=32, state_dim=8)),
            models=PLAIN, lrs=(1e-2,), seeds=(0,), batch_size=16, steps=60, sequences=32,
        ),
        full=Size(
            tasks=(Recall(keys=64, pairs=(4, 8, 16), length=64),),
            shapes=tuple(Shape(d_model=128, num_heads=4, state_dim=n) for n in (32, 8)),
            models=PLAIN, lrs=(3e-3, 1e-3, 1e-2), seeds=SEEDS, batch_size=64, steps=10000, sequences=256,
            precision="bfloat16",
        ),
    ),
    "tracking": Experiment(
        "state tracking: parity, addition modulo 5, and the permutations of 3 and of 5 things",
        smoke=Size(
            tasks=tuple(Tracking(group=g, length=16, longest=64) for g in ("Z2", "S3")),
            shapes=(SMALL,), models=tuple(MODELS), lrs=(1e-2,), seeds=(0,), batch_size=16, steps=60, sequences=32,
        ),
        full=Size(
            tasks=tuple(Tracking(group=g, length=64, longest=256) for g in ("Z2", "S3", "S5", "Z5")),
            shapes=(Shape(d_model=128, num_heads=4, state_dim=32),),
            models=tuple(MODELS), lrs=(3e-3, 1e-3), seeds=SEEDS, batch_size=128, steps=2000, sequences=256,
            precision="bfloat16",
        ),
    ),
    "length": Experiment(
        "text at up to 16 times the training length, by position",
        smoke=Size(
            tasks=(Text(length=64, longest=1024),),
            shapes=(SMALL,), models=PLAIN, lrs=(1e-2,), seeds=(0,), batch_size=8, steps=60, sequences=8,
        ),
        full=Size(
            tasks=(Text(length=256, longest=4096),),
            shapes=(Shape(d_model=256, num_blocks=4, num_heads=4, state_dim=64),),
            models=PLAIN, lrs=(3e-3,), seeds=SEEDS, batch_size=64, steps=2000, sequences=128, precision="bfloat16",
        ),
    ),
    "needle": Experiment(
        "key-value pairs hidden in up to 128 K random tokens",
        smoke=Size(
            tasks=(Needle(needles=2, keys=16, length=64, lengths=(64, 256, 1024, 4096)),),
            shapes=(SMALL,), models=PLAIN, lrs=(1e-2,), seeds=(0,), batch_size=16, steps=60, sequences=8,
        ),
        full=Size(
            tasks=(Needle(needles=4, keys=32, length=256, lengths=tuple(2**n for n in (8, 10, 12, 14, 16, 17))),),
            shapes=(Shape(d_model=128, num_heads=4, state_dim=32),),
            models=PLAIN, lrs=(3e-3, 1e-3), seeds=SEEDS, batch_size=32, steps=10000, sequences=16, precision="bfloat16",
        ),
    ),
    "language": Experiment(
        "text at equal parameters and tokens: bits per byte, and tokens per second",
        smoke=Size(
            tasks=(Text(length=64, longest=64),),
            shapes=(SMALL,), models=PLAIN, lrs=(1e-2,), seeds=(0,), batch_size=8, steps=60, sequences=64,
        ),
        full=Size(
            tasks=(Text(length=512, longest=512),),
            shapes=(Shape(d_model=256, num_blocks=4, num_heads=4, state_dim=64),),
            models=PLAIN, lrs=(3e-3,), seeds=SEEDS, batch_size=64, steps=1000, sequences=1024, precision="bfloat16",
        ),
        timed=True,
    ),
}  # fmt: skip


def standard_library() -> Data:
    """Return the source of Python's standard library without its tests, as bytes."""
    return Data(
        paths=(Path(sysconfig.get_path("stdlib")),), suffixes=(".py",),
        exclude=("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    )  # fmt: skip


def reads_text(runs: Sequence[Run]) -> bool:
    """Return whether a run's task is a text, which has to be tokenized before."""
    return any(isinstance(run.task, Text) for run in runs)


def with_folder(run: Run, tokens: Path) -> Run:
    """Return a run that reads its text, if it has one, from the folder of its tokens."""
    if not isinstance(run.task, Text):
        return run
    return dataclasses.replace(run, task=dataclasses.replace(run.task, folder=str(tokens)))
