"""The benchmark of training on several GPUs: one step of a language model that processes share, as in `tfla train`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tfla.bench.models import Mixer, random_model
from tfla.bench.stream_profile import profiled
from tfla.bench.training import autocast, update
from tfla.measure.problem import Problem, Work
from tfla.nn import LanguageModel
from tfla.nn.layers import wrap_forward
from tfla.train import gathers
from tfla.train.evaluation import token_losses
from tfla.train.ranks import Ranks


def step(
    problem: Problem,
    mixer: Mixer,
    layout: dict[str, int] | None = None,
    activation_checkpointing: bool = False,
    blocks: int = 24,
    vocab: int = 50_257,
    passes: int = 1,
    reduce_each_pass: bool = True,
    dtypes: dict[str, str] | None = None,
    profile: bool = False,
    **options: Any,
) -> Work:
    """Return a training step of this process's part of a batch: random tokens, one document a sequence.

    A call returns the loss of the call before, see :func:`tfla.bench.training.update`. Weights are in float32, under
    autocast to the problem's dtype. "allocated_bytes" among the facts of the result is the most that this process has
    held on its GPU, weights and the optimizer's states included.

    Args:
        problem: B are the sequences of all processes together.
        mixer: the mixer of the model.
        layout: the sizes of the mesh's dimensions, as :func:`tfla.distributed.parallelize` takes them; None for one
            process.
        activation_checkpointing: compute blocks and logits again in the backward.
        blocks: the blocks of the model.
        vocab: the size of its vocabulary.
        passes: the parts of a batch whose gradients are accumulated.
        reduce_each_pass: whether FSDP2 reduces gradients after each of them, or once.
        dtypes: the dtypes of FSDP2's `MixedPrecisionPolicy` by name, such as "reduce_dtype"; None is float32.
        profile: also profile a step that follows another one: "streams" among the facts is its
            :func:`tfla.bench.stream_profile.summary`.
        options: further options of :func:`tfla.distributed.parallelize`. Without reshard_after_forward, weights are
            gathered as `tfla train` does by default.

    Raises:
        RuntimeError: the loss or the gradients of the step before are not finite.
    """
    torch.manual_seed(0)  # every process draws the same weights and the whole batch, and keeps its part
    model = random_model(problem, mixer, blocks, vocab)
    windows = torch.randint(vocab, (problem.B, problem.T + 1), device=problem.device)
    if layout is None:
        ranks = Ranks(device=torch.device(problem.device))
        for block in model.blocks:
            wrap_forward(block, activation_checkpointing, compile=False)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from tfla.distributed import parallelize

        kind = torch.device(problem.device).type
        mesh = init_device_mesh(kind, tuple(layout.values()), mesh_dim_names=tuple(layout))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        ranks = Ranks(
            dist.get_rank(), dist.get_world_size(), layout, dict(zip(layout, coordinate, strict=True)), mesh,
            torch.device(problem.device),
        )  # fmt: skip
        if dtypes is not None:
            options["mixed_precision"] = MixedPrecisionPolicy(**{k: getattr(torch, v) for k, v in dtypes.items()})
        if "reshard_after_forward" not in options:
            whole = passes > 1 and not reduce_each_pass
            options = _gathers(problem, model, layout, passes, activation_checkpointing, dtypes or {}, whole) | options
        parallelize(model, mesh, activation_checkpointing=activation_checkpointing, **options)
    index, parts = ranks.rows
    windows = windows.chunk(parts)[index].clone()
    facts: dict[str, Any] = {}

    def losses(windows: Tensor) -> Tensor:
        with autocast(problem):
            return token_losses(model, windows, bos=vocab, steps=ranks.steps, recompute_logits=activation_checkpointing)

    train = update(model, losses, ranks, passes, reduce_each_pass)

    def run(windows: Tensor) -> float | None:
        loss = train(windows)
        if windows.is_cuda:
            facts["allocated_bytes"] = max(facts.get("allocated_bytes", 0), torch.cuda.max_memory_allocated())
        if loss is None:
            return None
        # The mean over all processes, as in `tfla train`: so no host is ahead of another by more than a step.
        return math.fsum(part for (part,) in ranks.gather([loss])) / ranks.size

    if profile:
        for _ in range(2):  # the first steps make the optimizer's state and compile kernels
            run(windows)
        facts["streams"] = profiled(lambda: run(windows))
    return Work(run, [windows], facts)


def _gathers(
    problem: Problem, model: LanguageModel, layout: dict[str, int], passes: int, checkpointing: bool,
    dtypes: dict[str, str], whole_gradients: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return how `tfla train` gathers the weights of this step, as options of :func:`tfla.distributed.parallelize`."""
    rows = math.prod(layout.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp"))
    tokens = problem.B * problem.T // (rows * passes)
    step = gathers.Step(
        model.config, tokens, problem.dtype == "bfloat16", checkpointing, dtypes.get("param_dtype") == "bfloat16",
        whole_gradients,
    )  # fmt: skip
    device = torch.device(problem.device)
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return gathers.choose(None, None, step, layout, total, total)._asdict()
