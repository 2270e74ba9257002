"""The layout of a run on its processes: checks that it is possible, and the model on their devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.layers import wrap_forward
from tfla.train import gathers
from tfla.train.config import Parallel, TrainConfig
from tfla.train.memory import uses_loss_kernels
from tfla.train.ranks import Ranks

NOTHING_SHARED = "where no processes share the sequences or their steps"


def check_layout(config: TrainConfig, model: ModelConfig, ranks: Ranks) -> None:
    """Raise UserError unless the batch, the sequences and the model can be divided among the processes of a run."""
    rows, steps = ranks.rows[1], ranks.steps.parts
    if config.micro_batch_size % rows:
        raise UserError(
            f"batch_size: got {config.batch_size} with accumulate {config.accumulate}, expected a multiple of "
            f"{config.accumulate * rows}, since {rows} processes share the sequences of a pass"
        )
    if config.context % ranks.steps.spans:
        times = "" if ranks.steps.spans == steps else f"{ranks.steps.spans // steps} x "
        raise UserError(
            f"context: got {config.context}, expected a multiple of {times}parallel.cp, {ranks.steps.spans}"
        )
    for name in config.parallel.without_meaning(rows * steps, steps):
        given, default = getattr(config.parallel, name), getattr(Parallel(), name)
        where = "with parallel.cp 1" if name == "cp_order" else NOTHING_SHARED
        raise UserError(f"parallel.{name}: got {given}, expected {default} {where}")
    if config.parallel.gather_dtype != "float32" and not uses_bfloat16(config, ranks.device):
        raise UserError(
            f"parallel.gather_dtype: got {config.parallel.gather_dtype} with precision {config.precision} on "
            f"{ranks.device.type}, expected it with bfloat16 alone"
        )
    if ranks.size == 1:
        return
    from tfla.distributed.parallel_model import check_model

    try:
        with torch.device("meta"):
            blocks = len(model.layers or (model.mixer,))  # one of each kind
            check_model(LanguageModel(replace(model, num_blocks=blocks)), ranks.sizes)
    except ValueError as error:
        raise UserError(f"parallel: {error}") from error


def distribute(model: LanguageModel, config: TrainConfig, ranks: Ranks) -> None:
    """Move a model to the devices of the processes of a run, in place, with the checkpointing and compilation asked."""
    if ranks.mesh is None:
        model.to(ranks.device)
        for block in model.blocks:
            wrap_forward(block, config.activation_checkpointing, compile=False)
        if config.compile:
            compiled(model)
        return
    from tfla.distributed import parallelize

    given, options = config.parallel, {}
    if ranks.rows[1] * ranks.steps.parts > 1:
        tokens, bfloat16 = tokens_of_pass(config, ranks), uses_bfloat16(config, ranks.device)
        step = gathers.Step(
            model.config, tokens, bfloat16, config.activation_checkpointing, given.gather_dtype == "bfloat16",
            config.accumulate > 1 and not given.reduce_each_pass, given.prefetch or 0,
            uses_loss_kernels(ranks.device, config.compile),
        )  # fmt: skip
        options = gathers.chosen(given.reshard_after_forward, given.blocks_per_gather, step, ranks)._asdict()
    parallelize(
        model, ranks.mesh, mixed_precision=_policy(config), compile=config.compile,
        activation_checkpointing=config.activation_checkpointing, prefetch=given.prefetch, cp_order=given.cp_order,
        **options,
    )  # fmt: skip
    model.to(ranks.device)
    if config.compile:
        _compile_losses(model, "inductor")


def _policy(config: TrainConfig) -> Any:
    """Return FSDP2's policy on the dtypes of gathered weights and reduced gradients; None where all are float32."""
    gather, reduce = config.parallel.gather_dtype, config.parallel.reduce_dtype
    if gather == reduce == "float32":
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    param_dtype = None if gather == "float32" else getattr(torch, gather)
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=getattr(torch, reduce))


def compiled(model: LanguageModel, backend: Any = "inductor") -> LanguageModel:
    """Let torch.compile run a model from here on, in place, and return it.

    The blocks share one graph, since a graph of the whole model would take many times as long to compile; the logits
    are another, and so are the losses.

    Args:
        model: the model.
        backend: the backend of torch.compile.
    """
    for block in model.blocks:
        block.compile(backend=backend)
    _compile_losses(model, backend)
    return model


def _compile_losses(model: LanguageModel, backend: Any) -> None:
    """Let torch.compile run the logits and the losses of a model, which follow its blocks, in place."""
    for name in ("logits", "losses_of_hidden"):
        setattr(model, name, torch.compile(getattr(model, name), backend=backend))


def tokens_of_pass(config: TrainConfig, ranks: Ranks) -> int:
    """Return the tokens of one pass of a process."""
    return config.micro_batch_size * config.context // (ranks.rows[1] * ranks.steps.parts)


def uses_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Return whether the model runs under autocast to bfloat16."""
    return config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")


def autocast_of(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context of the run's precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(config, device))
