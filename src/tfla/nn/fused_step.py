"""The language model's step for a few sequences, in six launches per block.

The kernels and their equations are in :mod:`tfla.nn.step_kernels` for one sequence, and for more in
:mod:`tfla.nn.batched_step_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.backends.gpu.runtime import INSTALLED, INTERPRETED
from tfla.nn.layers import GatePreactivation, HeadNorm, Projection
from tfla.nn.mixers.mlstm import MLSTM
from tfla.nn.model import Block, LanguageModel, ModelState
from tfla.ops.autocast import autocast_dtype
from tfla.ops.state import State
from tfla.ops.steps import mlstm_step

MAX_COLUMNS = 16_384  # of a weight matrix, since one program loads a whole row
MAX_BATCH = 16  # sequences, since they are the rows of one tile of tensor cores
# The modules that the kernels implement.
SUPPORTED_MODULES = (nn.Embedding, nn.RMSNorm, nn.SiLU, Projection, GatePreactivation, HeadNorm)


def unsupported(model: LanguageModel, state: ModelState, batch: int | None = None) -> str | None:
    """Return why :class:`FusedStep` cannot replace the model's own step, or None if it can.

    `batch` is the number of sequences of a step, whose states are rows of the pool `state`. Where it is None, each row
    of `state` is a sequence.

    A model with forward hooks or with modules of other types keeps its own step.
    """
    weight = model.embedding.weight
    if not INSTALLED or not (weight.is_cuda or INTERPRETED):
        return "it needs Triton and an NVIDIA GPU"
    sizes = {len(each.C) if batch is None else batch for each in state if isinstance(each, State)}
    if not all(isinstance(each, State) for each in state) or max(sizes) > MAX_BATCH:
        return f"it is for mLSTMs and up to {MAX_BATCH} sequences"
    if model.config.batch_invariant:
        return "it adds up products in another order than larger batches do"
    if autocast_dtype(weight.device.type) is not None:
        return "it does not support autocast"
    if max(model.config.d_model, model.config.ffn_dim) > MAX_COLUMNS:
        return f"it takes rows of up to {MAX_COLUMNS} weights"
    for name, parameter in model.named_parameters():
        if parameter.dtype != weight.dtype or not parameter.is_contiguous() or parameter.device != weight.device:
            return f"{name} is not contiguous, or unlike the embedding"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes no weights of {weight.dtype}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks"
        if not any(module.children()) and type(module) not in SUPPORTED_MODULES:
            return f"{name} is a {type(module).__name__}"
    return None


@dataclass(frozen=True)
class TileConfig:
    """The tiles of a kernel for several sequences.

    Attributes:
        rows: rows of the weight matrix that a program computes.
        columns: columns that it reads at a time, of weights of two bytes.
        stages: blocks of columns that are on their way or in use. All programs of a launch should fit on the device at
            once, with some 64 KiB of weights on their way to each multiprocessor.
    """

    rows: int
    columns: int
    stages: int


# Chosen so that the conditions above hold; no other sizes have been measured.
TILES = {
    "mixer_inputs": TileConfig(rows=32, columns=128, stages=5),
    "add_product": TileConfig(rows=32, columns=256, stages=5),
    "swiglu": TileConfig(rows=32, columns=128, stages=4),
    "logits": TileConfig(rows=32, columns=128, stages=5),
}


class FusedStep:
    """A callable that computes ``model.step(ids, state, in_place=True)`` for a few sequences.

    Sums are float32 and are rounded less often than in the model's own step.

    Args:
        model: a model for which :func:`unsupported` returns None.
        batch: the number of sequences, from 1 to MAX_BATCH.
    """

    def __init__(self, model: LanguageModel, batch: int = 1) -> None:
        from tfla.nn import batched_step_kernels, step_kernels

        self.model, self.batch = model, batch
        self.kernels: Any = step_kernels if batch == 1 else batched_step_kernels
        self.gated_heads: Any = step_kernels.gated_heads
        config, weight = model.config, model.embedding.weight
        self.D, self.H, self.hidden = config.d_model, config.num_heads, config.ffn_dim
        self.DQ, self.eps, self.cap = config.num_heads * config.qk_head_dim, config.norm_eps, config.gate_soft_cap
        self.qkvo = weight.new_empty(batch * (2 * self.DQ + 2 * self.D))
        self.gates = weight.new_empty(2, batch, self.H, dtype=torch.float32)
        self.mixed, self.inner = weight.new_empty(batch, self.D), weight.new_empty(batch, self.hidden)
        self.out = weight.new_empty(batch, config.vocab_size, dtype=torch.float32)

    def __call__(
        self, ids: Tensor, state: ModelState, state_indices: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Advance the sequences by one token.

        Args:
            ids: (B,) int64.
            state: the state before the token. Its C is overwritten.
            state_indices: (B,), the row of each sequence in ``state``, which is then a pool; None is no pool.

        Returns:
            logits (B, vocab_size) float32, which the next call overwrites, and the new state.
        """
        model = self.model
        x = F.embedding(ids, model.embedding.weight)
        options: dict[str, Any] = {"in_place": True} if state_indices is None else {"state_indices": state_indices}
        new = tuple(self._block(block, x, before, options) for block, before in zip(model.blocks, state, strict=True))  # type: ignore[arg-type]
        # (7) soft-capped logits
        self._launch(
            "logits", [model.config.vocab_size], self.D,
            x, model.norm.weight, self.eps, model.unembedding.weight, model.config.logit_soft_cap, self.out,
        )  # fmt: skip
        return self.out, new

    def _block(self, block: Block, x: Tensor, state: State, options: dict[str, Any]) -> State:
        """Add a block's output to x (B, d_model) in place and return its new state; options are of the operator."""
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, MLSTM)
        B, D, DQ, H = self.batch, self.D, self.DQ, self.H
        # (1)-(3) RMSNorm, q, k, v, o and the gates
        self._launch(
            "mixer_inputs", [H, H, DQ, DQ, D, D], D,
            x, block.mixer_norm.weight, self.eps, mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight,
            mixer.output_gate.weight, mixer.input_gate.weight, mixer.input_gate.bias, mixer.forget_gate.weight,
            mixer.forget_gate.bias, self.cap, self.qkvo, self.gates, DQ=DQ, DV=D, H=H,
        )  # fmt: skip
        q, k, v, o = self.qkvo.split([B * DQ, B * DQ, B * D, B * D])
        h, new = mlstm_step(
            q.view(B, H, -1), k.view(B, H, -1), v.view(B, H, -1), self.gates[0], self.gates[1], state,
            input_gate=mixer.input_gate_kind, **options,
        )  # fmt: skip
        # (4) x <- x + W_out (sigmoid(o) * NORM(h))
        norm, d = mixer.head_norm, mixer.head_dim
        self.gated_heads[(B * H,)](
            h, o, norm.weight, norm.eps, self.mixed,
            D=d, BD=power_of_two(d), H=H, LAYER=norm.kind == "layer", num_warps=4,
        )  # fmt: skip
        self._launch("add_product", [D], D, mixer.out_proj.weight, self.mixed, x)
        # (5), (6) x <- x + W_down (silu(W_gate z) * W_up z) for z = RMSNorm(x)
        self._launch(
            "swiglu", [self.hidden], D,
            x, block.ffn_norm.weight, self.eps, ffn.gate_proj.weight, ffn.up_proj.weight, self.inner,
        )  # fmt: skip
        self._launch("add_product", [D], self.hidden, ffn.down_proj.weight, self.inner, x)
        return new

    def _launch(self, kernel: str, rows: Sequence[int], columns: int, *operands: Any, **constants: int) -> None:
        """Launch a kernel for products with matrices of so many rows each, and so many columns."""
        if self.batch == 1:
            constants |= {"BD": power_of_two(columns), "num_warps": _warps(columns)}
        else:
            tile = TILES[kernel]
            if len(rows) == 1:
                constants["N"] = rows[0]
            rows = [-(-each // tile.rows) for each in rows]
            block = 2 * tile.columns // self.qkvo.element_size()
            constants |= {"BATCH": self.batch, "ROWS": tile.rows, "BK": block, "num_stages": tile.stages}
        getattr(self.kernels, kernel)[(sum(rows),)](*operands, D=columns, **constants)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _warps(width: int) -> int:
    """Return the number of warps of a program that loads rows of ``width`` columns."""
    return 4 if width <= 4096 else 8
