"""The language models with random weights that benchmarks time."""

from __future__ import annotations

from typing import Literal

import torch

from tfla.measure.problem import Problem
from tfla.nn import LanguageModel, ModelConfig

Mixer = Literal["mlstm_exp", "mlstm_sig", "attention"]


def random_model(problem: Problem, mixer: Mixer, blocks: int, vocab: int) -> LanguageModel:
    """Return a model with the heads and on the device of a problem, in torch's default dtype."""
    fields = {
        "d_model": problem.H * problem.dhv, "num_blocks": blocks, "num_heads": problem.H, "mixer": mixer,
        "vocab_size": vocab, "qk_factor": problem.dqk / problem.dhv,
    }  # fmt: skip
    with torch.device(problem.device):
        return LanguageModel(ModelConfig.from_dict(fields))  # attention has no qk_factor
