"""The benchmark of generation: one step of a whole language model."""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils._pytree import tree_leaves

from tfla.bench.models import random_model
from tfla.measure.problem import Problem, Work
from tfla.nn import Decoder


def decode(
    problem: Problem,
    mixer: Literal["mlstm_exp", "mlstm_sig"],
    blocks: int = 32,
    vocab: int = 50_304,
    own_step: bool = False,
) -> Work:
    """Return a step of a model with random weights, as `tfla.nn.generate` calls it.

    With `own_step` it is the model's own step also where a :class:`Decoder` would fuse it.

    `moved_bytes` counts all weights once except the embedding table, of which a step reads one row a sequence, and the
    states twice.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, problem.dtype))  # weights are created on their device in their dtype
    try:
        model = random_model(problem, mixer, blocks, vocab)
    finally:
        torch.set_default_dtype(before)
    if own_step:
        model.embedding.register_forward_hook(lambda *_: None)  # a model with hooks keeps its own step
    decoder = Decoder(model, model.initial_state(problem.B))
    ids = torch.zeros(problem.B, dtype=torch.int64, device=problem.device)
    weights = sum(p.nbytes for p in model.parameters()) - model.embedding.weight.nbytes
    states = sum(t.nbytes for t in tree_leaves(decoder.state) if t is not None)
    return Work(decoder.step, [ids], {"moved_bytes": weights + 2 * states})
