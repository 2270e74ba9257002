"""The models that are compared: one for each mixer, and hybrids, with equal states and equal numbers of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tfla.nn import LanguageModel, ModelConfig

FFN_FACTOR = 8 / 3  # of the model with attention, whose number of parameters the others are given
MODELS: dict[str, dict[str, Any]] = {
    "mlstm_exp": {"mixer": "mlstm_exp"},
    "mlstm_sig": {"mixer": "mlstm_sig"},
    "retnet": {"mixer": "retnet"},
    "mamba2": {"mixer": "mamba2"},
    "gla": {"mixer": "gla"},
    "delta_net": {"mixer": "delta_net"},
    "delta_net_2": {"mixer": "delta_net", "negative_eigenvalues": True},
    "gated_delta_net": {"mixer": "gated_delta_net"},
    "gated_delta_net_2": {"mixer": "gated_delta_net", "negative_eigenvalues": True},
    "kda": {"mixer": "kda"},
    "kda_2": {"mixer": "kda", "negative_eigenvalues": True},
    "attention": {"mixer": "attention"},
    "mlstm_exp+attention": {"layers": ("mlstm_exp", "attention")},
    "gated_delta_net+attention": {"layers": ("gated_delta_net", "attention")},
}
LABELS = {
    "mlstm_exp": "mLSTMexp",
    "mlstm_sig": "mLSTMsig",
    "retnet": "RetNet",
    "mamba2": "Mamba-2",
    "gla": "GLA",
    "delta_net": "DeltaNet",
    "delta_net_2": "DeltaNet, β < 2",
    "gated_delta_net": "Gated DeltaNet",
    "gated_delta_net_2": "Gated DeltaNet, β < 2",
    "kda": "KDA",
    "kda_2": "KDA, β < 2",
    "attention": "attention",
    "mlstm_exp+attention": "mLSTMexp and attention",
    "gated_delta_net+attention": "Gated DeltaNet and attention",
}


@dataclass(frozen=True)
class Shape:
    """The sizes that all models of an experiment share."""

    d_model: int
    num_blocks: int = 2
    num_heads: int = 2
    state_dim: int = 32
    """The key dimension of a head of recurrent mixers; their states have state_dim * d_model numbers in each block."""


@lru_cache
def model_config(name: str, shape: Shape, vocab_size: int) -> ModelConfig:
    """Return the config of a model whose feed-forward width makes up for the parameters of its mixers.

    Values are as wide as the model, and keys have ``shape.state_dim`` channels a head. Mamba-2's values are twice as
    wide, so that its keys have half as many channels: the states of all recurrent mixers have equally many numbers.

    Args:
        name: one of MODELS.
        shape: the sizes.
        vocab_size: the number of tokens.

    Raises:
        ValueError: the mixers alone have more parameters than the model with attention.
    """
    target = _parameters(_config("attention", shape, vocab_size, round(FFN_FACTOR * shape.d_model)))
    single, double = (_parameters(_config(name, shape, vocab_size, width)) for width in (1, 2))
    width = 1 + round((target - single) / (double - single))
    if width < 1:
        raise ValueError(f"shape: got {shape}, whose mixers of {name} alone have more than {target} parameters")
    return _config(name, shape, vocab_size, width)


def _config(name: str, shape: Shape, vocab_size: int, ffn_width: int) -> ModelConfig:
    """Return the config of a model with a feed-forward network of that width."""
    d, heads = shape.d_model, shape.num_heads
    fields = {
        "d_model": d, "num_blocks": shape.num_blocks, "num_heads": heads, "vocab_size": vocab_size,
        "ffn_factor": ffn_width / d, "ffn_multiple": 1,
        "qk_factor": shape.state_dim * heads / d, "key_width": shape.state_dim * heads / d, "value_width": 1.0,
        "mamba_head_dim": 2 * d // heads, "mamba_state_dim": shape.state_dim // 2, **MODELS[name],
    }  # fmt: skip
    return ModelConfig.from_dict(fields)  # mixers that have other options leave these out


@lru_cache
def _parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        return LanguageModel(config).num_parameters()


def state_size(config: ModelConfig) -> int | None:
    """Return the numbers in the recurrent state of a sequence, over all blocks; None where it grows with attention."""
    if "attention" in config.mixer_counts:
        return None
    with torch.device("meta"):
        model = LanguageModel(config)
    states: list[Any] = [getattr(entry, "recurrence", entry) for entry in model.initial_state(1)]
    return sum(state.C.numel() for state in states)
