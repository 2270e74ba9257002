"""The benchmark of the sequence mixers of a language model: one layer over sequences, and one step of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.bench.replay import Replay
from tfla.measure.problem import Problem, Work
from tfla.nn import KeyValues, ModelConfig
from tfla.nn.layers import SequenceMixer
from tfla.nn.mixers import MIXERS

# The fields of each mixer's config that differ from the defaults at width 2,048; keys have 128 channels in each head.
HEADS: dict[str, dict[str, Any]] = {
    "mlstm_exp": {"num_heads": 8},
    "mlstm_sig": {"num_heads": 8},
    "mamba2": {"num_heads": 16},  # has its own heads, of 64 value channels
    "retnet": {"num_heads": 16},
    "gla": {"num_heads": 8},
    "delta_net": {"num_heads": 16},
    "gated_delta_net": {"num_heads": 16, "key_width": 1.0, "value_width": 2.0},  # as Qwen3-Next
    "kda": {"num_heads": 16},
    "attention": {"num_heads": 16},
}
WIDTH = 2048


def config_of(mixer: str, **fields: Any) -> ModelConfig:
    """Return the config of a model of one block; `fields` replace those of the benchmark."""
    given: dict[str, Any] = {"d_model": WIDTH, "num_blocks": 1, "vocab_size": 1, "mixer": mixer}
    return ModelConfig.from_dict(given | HEADS[mixer] | fields)


def build(problem: Problem, mixer: str, **fields: Any) -> tuple[SequenceMixer, ModelConfig]:
    """Return a layer with random weights in the problem's dtype, and its config."""
    config = config_of(mixer, **fields)
    with torch.device(problem.device):
        built: SequenceMixer = MIXERS[mixer](config)
    return built.to(getattr(torch, problem.dtype)), config


def layer(problem: Problem, mixer: str, **fields: Any) -> Work:
    """Return a call of a layer on B sequences of T tokens: projections, convolutions, recurrence, gates and norms.

    The backward computes the gradients of the input and of all weights. Its row has the number of parameters and the
    heads.

    Args:
        problem: its B, T, dtype and device.
        mixer: a key of HEADS.
        fields: values of other fields of the config.
    """
    built, config = build(problem, mixer, **fields)
    x, weights = problem.randn(problem.B, problem.T, config.d_model), list(built.parameters())
    return Work(lambda x, *_: built(x)[0], [x, *weights], _facts(built, config))


def step(problem: Problem, mixer: str, **fields: Any) -> Work:
    """Return a call of a layer for one more token of B sequences, on a GPU replayed from a CUDA graph.

    Attention has T tokens in its cache. The arguments are those of :func:`layer`.
    """
    built, config = build(problem, mixer, **fields)
    x, state = problem.randn(problem.B, config.d_model), built.initial_state(problem.B, torch.device(problem.device))
    if isinstance(state, KeyValues):
        shape = problem.B, problem.T, *state.k.shape[2:]
        state = KeyValues(problem.randn(*shape), problem.randn(*shape)).reserve(problem.T + 1)

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        return built.step(x, state, in_place=True)[0]

    if problem.device == "cpu":
        return Work(run, [x], _facts(built, config))
    return Work(Replay(run, x.device, x), [x], _facts(built, config))


def facts_of(mixer: str) -> dict[str, Any]:
    """Return the facts in the rows of a mixer: the number of parameters, and the heads as text."""
    return _facts(*build(Problem(1, 1, 1, 1, 1, device="meta"), mixer))


def _facts(built: SequenceMixer, config: ModelConfig) -> dict[str, Any]:
    """Return the number of parameters of a layer, and its heads as text."""
    values = config.mamba_expand * config.d_model if config.mixer == "mamba2" else config.num_heads * config.head_dim
    heads = values // config.head_dim
    return {
        "parameters": sum(p.numel() for p in built.parameters()),
        "heads": f"{heads} of {config.qk_head_dim} × {config.head_dim}",
    }
