"""The results of a training run, small enough to be kept in a repository."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tfla.nn import LanguageModel
from tfla.paper.experiments.plans import Variant
from tfla.train.config import TrainConfig
from tfla.train.logging import read_metrics
from tfla.train.run_folder import CHECKPOINTS_FOLDER
from tfla.train.tokenizer import ByteTokenizer

FAILED = "failed.txt"
EVERY = 10  # steps between points of the curves, but for the gradient norm, whose spikes are single steps


def finished(config: TrainConfig) -> bool:
    """Return whether a run is finished: its last step was saved, or training failed."""
    last = config.run / CHECKPOINTS_FOLDER / f"step-{config.steps:08d}"
    return last.exists() or (config.run / FAILED).exists()


def _digits(values: list[Any], digits: int) -> list[Any]:
    """Return the values rounded to so many significant digits."""
    return [None if x is None else float(f"{x:.{digits}g}") for x in values]


def outcome(variant: Variant, config: TrainConfig) -> dict[str, Any]:
    """Return the variant, its evaluations, its curves and, where training failed, the reason."""
    records = read_metrics(config.run)
    steps = [r for r in records if r["kind"] == "train"]
    coarse = [r for r in steps if r["step"] % EVERY == 0]
    failed = config.run / FAILED
    row: dict[str, Any] = {"name": variant.name, **dataclasses.asdict(variant)}
    if failed.exists():
        row["failed"] = failed.read_text().strip()
    if not records:
        return row
    with torch.device("meta"):
        model = LanguageModel(config.model.build(ByteTokenizer.vocab_size))
    return row | {
        "parameters": model.num_parameters(),
        "seconds": round(steps[-1]["elapsed"], 1) if steps else 0.0,
        "evals": [
            {name: r[name] for name in ("step", "loss", "perplexity", "bits_per_byte")}
            for r in records if r["kind"] == "eval"
        ],
        "step": [r["step"] for r in coarse],
        "loss": _digits([r["loss"] for r in coarse], 4),
        "max_input_gate": _digits([r["max_input_gate"] for r in coarse], 4),
        "grad_norm": _digits([r["grad_norm"] for r in steps], 3),
    }  # fmt: skip
