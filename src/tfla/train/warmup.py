"""The command `tfla warmup`, which fills the cache of compiled kernels that the processes of a server then load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tfla
from tfla._util.device import pick_device
from tfla._util.errors import UserError, one_line
from tfla._util.parsing import parse
from tfla._util.warm_calls import Warmup
from tfla.nn import LanguageModel
from tfla.nn import warmup as warm
from tfla.train.checkpoint import find_model


@dataclass(frozen=True)
class WarmupConfig:
    """Compile what a model, or calls of an operator, need before the first request, and say how long it took."""

    checkpoint: Path | None = None
    """The folder of a run (its newest checkpoint), a checkpoint, or a model that save_pretrained wrote."""
    shape: tuple[int, int, int, int, int] | None = None
    """Without a checkpoint: sequences, steps, heads, and head dims of keys and values of calls of an operator."""
    form: str = "mlstm_exp"
    """With a shape: what the operator computes, the name of a mixer."""
    backward: bool = True
    """With a shape: whether to compile the backward too."""
    prompts: tuple[int, ...] = (1, 1024)
    """Numbers of tokens of prompts."""
    batches: tuple[int, ...] = (1,)
    """Numbers of sequences that decode together."""
    states_every: int | None = None
    """Tokens between the states that a cache of prefixes keeps; None is no such cache."""
    capacity: int | None = None
    """For models with attention, tokens for which caches have room."""
    pool: int | None = None
    """For a server with a pool of states, the number of its rows."""
    dtype: str = "bfloat16"
    """Dtype of the weights on a GPU: bfloat16, float16 or float32."""
    device: str = "auto"
    """auto is the GPU if there is one."""


def warmup(args: Sequence[str]) -> int:
    """Run ``tfla warmup``."""
    config = parse(WarmupConfig, args, "tfla warmup")
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if config.dtype not in dtypes:
        raise UserError(f"dtype: got {config.dtype!r}, expected one of {', '.join(dtypes)}")
    if (config.checkpoint is None) == (config.shape is None):
        raise UserError("checkpoint, shape: got both or neither, expected one of them")
    of_models = ("prompts", "batches", "states_every", "capacity", "pool")
    for name in of_models if config.checkpoint is None else ("form", "backward"):
        if getattr(config, name) != getattr(WarmupConfig(), name):
            raise UserError(f"{name}: got it, expected it with {'checkpoint' if name in of_models else 'shape'} alone")
    device = pick_device(config.device)
    try:
        if config.checkpoint is None:
            print(warmup_operator(config, dtypes[config.dtype], device))
            return 0
        dtype = dtypes[config.dtype] if torch.device(device).type == "cuda" else None
        model = LanguageModel.from_pretrained(find_model(config.checkpoint), device, dtype, backend=None)
        found = warm(
            model, prompts=config.prompts, batches=config.batches, states_every=config.states_every,
            capacity=config.capacity, pool=config.pool,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(one_line(error)) from error
    print(found)
    return 0


def warmup_operator(config: WarmupConfig, dtype: torch.dtype, device: torch.device) -> Warmup:
    """Compile what calls of an operator need."""
    assert config.shape is not None
    form: Any = config.form
    return tfla.warmup(*config.shape, form=form, dtype=dtype, device=device, backward=config.backward)
