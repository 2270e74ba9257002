"""The language model's step for a few tokens, in six launches per block.

The tokens are one of each sequence, or a few proposed tokens of each. The kernels and their equations are in
:mod:`tfla.nn.step_kernels` for one token, and for more in :mod:`tfla.nn.batched_step_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.backends.gpu.runtime import INSTALLED, INTERPRETED
from tfla.nn.block import Block
from tfla.nn.capped_loss import LARGEST_CAP
from tfla.nn.layers import GatePreactivation, HeadNorm, Projection, Unembedding
from tfla.nn.mixers.mlstm import MLSTM
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.step_tiles import MAX_BATCH, choose_tiles
from tfla.ops.autocast import autocast_dtype
from tfla.ops.gates import InputGate
from tfla.ops.state import State
from tfla.ops.steps import mlstm_step, mlstm_steps

MAX_COLUMNS = 16_384  # of a weight matrix, since one program loads a whole row
# The smallest d_model with which kernels for several sequences use wgmma. ptxas leaves matrix descriptors of narrower
# models unset, see `ampere_mmas`.
WGMMA_COLUMNS = 3072
# The modules that the kernels implement.
SUPPORTED_MODULES = (nn.Embedding, nn.RMSNorm, nn.SiLU, Projection, Unembedding, GatePreactivation, HeadNorm)

# From q, k, v, i and f of all tokens, (B, heads, ...) each, to h, (B, heads, dhv) or with B as two dimensions.
Recurrence = Callable[..., Tensor]


def unsupported(model: LanguageModel, state: ModelState, batch: int | None = None) -> str | None:
    """Return why :class:`FusedStep` cannot replace the model's own step, or None if it can.

    `batch` is the number of tokens of a call, where it is not the number of rows of `state`: of a pool it is the number
    of sequences, and of proposed tokens that of all sequences together.

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
    if max(model.config.gate_soft_cap, model.config.logit_soft_cap) > LARGEST_CAP:
        return f"its tanh is exact enough for soft caps up to {LARGEST_CAP:,.0f}"
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


class FusedStep:
    """A callable that computes ``model.step(ids, state, in_place=True)`` for a few sequences.

    :meth:`steps` computes ``model.steps(ids, state, in_place=True)``. Sums are float32 and are rounded less often than
    by the model itself.

    Args:
        model: a model for which :func:`unsupported` returns None.
        batch: the number of tokens of a call, from 1 to MAX_BATCH.
    """

    def __init__(self, model: LanguageModel, batch: int = 1) -> None:
        from tfla.backends.gpu.config import ampere_mmas, architecture
        from tfla.nn import batched_step_kernels, step_kernels

        self.model, self.batch = model, batch
        self.kernels: Any = step_kernels if batch == 1 else batched_step_kernels
        self.gated_heads: Any = step_kernels.gated_heads
        config, weight = model.config, model.embedding.weight
        self.D, self.H, self.hidden = config.d_model, config.num_heads, config.ffn_dim
        self.DQ, self.eps, self.cap = config.num_heads * config.qk_head_dim, config.norm_eps, config.gate_soft_cap
        self.mixed, self.inner = weight.new_empty(batch, self.D), weight.new_empty(batch, self.hidden)
        self.out = weight.new_empty(batch, config.vocab_size, dtype=torch.float32)
        self.tokens, self.tiles = choose_tiles(batch, architecture(weight.device), weight.element_size())
        self.compilation = {} if self.D >= WGMMA_COLUMNS else ampere_mmas(weight.device)
        # For several tokens: x times the weight of the next norm, and sums of squares of x by program.
        self.weighted = weight.new_empty(batch, self.D)
        most = max(self._parts("output"), self._parts("down"))
        self.squares = weight.new_empty(most, self.tokens, dtype=torch.float32)

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
        options: dict[str, Any] = {"in_place": True} if state_indices is None else {"state_indices": state_indices}
        new: list[State] = []

        def recur(number: int, *inputs: Tensor) -> Tensor:
            """Compute a step of a block and keep its new state."""
            h, after = mlstm_step(*inputs, state[number], input_gate=self._input_gate(number), **options)  # type: ignore[arg-type, misc]
            new.append(after)
            return h

        return self._logits(ids, recur), tuple(new)

    def steps(self, ids: Tensor, state: ModelState) -> tuple[Tensor, Callable[[Tensor], ModelState]]:
        """Compute the logits of a few proposed tokens of every sequence, of which some are accepted later.

        Args:
            ids: (B, T) int64, of as many tokens as this object is for.
            state: the state before the tokens, of B sequences. It is overwritten when tokens are accepted.

        Returns:
            logits (B, T, vocab_size) float32, which the next call overwrites, and a function that may be called once:
            from ``lengths`` (B,), 0 to T, to the state after so many tokens of each sequence.
        """
        calls: list[Callable[..., Any]] = []

        def recur(number: int, *inputs: Tensor) -> Tensor:
            """Compute the outputs of a block's recurrence and keep the call."""
            tensors = (t.unflatten(0, ids.shape) for t in inputs)
            calls.append(functools.partial(mlstm_steps, *tensors, state[number], input_gate=self._input_gate(number)))
            h: Tensor = calls[-1](return_state=False)
            return h

        def accept(lengths: Tensor) -> ModelState:
            """Return the state after some of the tokens."""
            return tuple(call(lengths=lengths, in_place=True)[1] for call in calls)

        return self._logits(ids.flatten(), recur).view(*ids.shape, -1), accept

    def _input_gate(self, number: int) -> InputGate:
        """Return the kind of the input gate of a block."""
        mixer = self.model.blocks[number].mixer
        assert isinstance(mixer, MLSTM)
        return mixer.input_gate_kind

    def _logits(self, ids: Tensor, recur: Recurrence) -> Tensor:
        """Return the logits (B, vocab_size) of tokens (B,), given the recurrences of the blocks."""
        model = self.model
        norms = [block.mixer_norm.weight for block in model.blocks] + [model.norm.weight]
        x = self._embed(ids, norms[0])
        for number, block in enumerate(model.blocks):
            self._block(block, x, norms[number], norms[number + 1], functools.partial(recur, number))
        # (7) soft-capped logits
        self._launch(
            "logits", "logits", [model.config.vocab_size], self.D,
            *self._normed(x, norms[-1]), self.eps, model.unembedding.weight, model.config.logit_soft_cap, self.out,
            after="down",
        )  # fmt: skip
        return self.out

    def _embed(self, ids: Tensor, norm: Tensor) -> Tensor:
        """Return x (B, d_model) of the tokens; for several tokens with what its norm needs."""
        table = self.model.embedding.weight
        if self.batch == 1:
            return F.embedding(ids, table)
        x = torch.empty_like(self.weighted)
        parts = self._parts("down")
        self.kernels.embed[(self.batch,)](
            ids.contiguous(), table, norm, x, self.weighted, self.squares, D=self.D, BD=power_of_two(self.D),
            TOKENS=self.tokens, PARTS=parts, BP=power_of_two(parts), num_warps=4,
        )  # fmt: skip
        return x

    def _block(self, block: Block, x: Tensor, norm: Tensor, next_norm: Tensor, recur: Recurrence) -> None:
        """Add a block's output to x (B, d_model) in place.

        Args:
            block: the block.
            x: the residual stream.
            norm: the weight (d_model,) of the norm before the mixer.
            next_norm: the weight (d_model,) of the norm after the block.
            recur: the recurrence of this block.
        """
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, MLSTM)
        B, D, DQ, H = self.batch, self.D, self.DQ, self.H
        # Proposed tokens are accepted from these tensors, when the next blocks have run.
        qkvo, gates = x.new_empty(B * (2 * DQ + 2 * D)), x.new_empty(2, B, H, dtype=torch.float32)
        # (1)-(3) RMSNorm, q, k, v, o and the gates
        self._launch(
            "mixer_inputs", "mixer_inputs", [H, H, DQ, DQ, D, D], D,
            *self._normed(x, norm), self.eps, mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight,
            mixer.output_gate.weight, mixer.input_gate.weight, mixer.input_gate.bias, mixer.forget_gate.weight,
            mixer.forget_gate.bias, self.cap, qkvo, gates, after="down", DQ=DQ, DV=D, H=H,
        )  # fmt: skip
        q, k, v, o = qkvo.split([B * DQ, B * DQ, B * D, B * D])
        h = recur(*(t.view(B, H, -1) for t in (q, k, v)), *gates)
        # (4) x <- x + W_out (sigmoid(o) * NORM(h))
        head_norm, d = mixer.head_norm, mixer.head_dim
        self.gated_heads[(B * H,)](
            h, o, head_norm.weight, head_norm.eps, self.mixed,
            D=d, BD=power_of_two(d), H=H, LAYER=head_norm.kind == "layer", num_warps=4,
        )  # fmt: skip
        ffn_norm = block.ffn_norm.weight
        self._add_product("output", mixer.out_proj.weight, self.mixed, x, ffn_norm)
        # (5), (6) x <- x + W_down (silu(W_gate z) * W_up z) for z = RMSNorm(x)
        self._launch(
            "swiglu", "swiglu", [self.hidden], D,
            *self._normed(x, ffn_norm), self.eps, ffn.gate_proj.weight, ffn.up_proj.weight, self.inner, after="output",
        )  # fmt: skip
        self._add_product("down", ffn.down_proj.weight, self.inner, x, next_norm)

    def _normed(self, x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return what kernels need of x and the weight of its norm."""
        return (x, norm) if self.batch == 1 else (self.weighted, self.squares)

    def _add_product(self, name: str, weight: Tensor, z: Tensor, x: Tensor, norm: Tensor) -> None:
        """Add W z to x (B, d_model) in place; ``norm`` is the weight of the norm that comes next."""
        prepared = () if self.batch == 1 else (norm, self.weighted, self.squares)
        self._launch("add_product", name, [self.D], z.shape[1], weight, z, x, *prepared)

    def _parts(self, name: str) -> int:
        """Return the number of programs of a launch of add_product."""
        return -(-self.D // self.tiles[name].rows)

    def _launch(
        self, kernel: str, name: str, rows: Sequence[int], columns: int, *operands: Any, after: str = "",
        **constants: int,
    ) -> None:  # fmt: skip
        """Launch a kernel for products with matrices.

        Args:
            kernel: the kernel.
            name: the name of the launch in TILES.
            rows: the rows of each matrix.
            columns: the columns of the matrices.
            operands: the arguments of the kernel.
            after: the name of the launch of add_product, if the kernel normalizes its result.
            constants: more constants of the kernel.
        """
        if self.batch == 1:
            constants |= {"BD": power_of_two(columns), "num_warps": _warps(columns)}
        else:
            tile = self.tiles[name]
            if after:
                constants |= {"PARTS": self._parts(after), "BP": power_of_two(self._parts(after))}
            if len(rows) == 1:
                constants["N"] = rows[0]
            rows = [-(-each // tile.rows) for each in rows]
            constants |= {
                "BATCH": self.batch, "TOKENS": self.tokens, "ROWS": tile.rows, "SPLITS": tile.splits,
                "BK": 2 * tile.columns // self.mixed.element_size(), "SWAPPED": tile.swapped,
                "num_stages": tile.stages, "num_warps": tile.warps, "OVERLAPPED": tile.overlapped,
            }  # fmt: skip
            if tile.overlapped:
                constants["launch_pdl"] = True
        compilation = {} if self.batch == 1 else self.compilation
        getattr(self.kernels, kernel)[(sum(rows),)](*operands, D=columns, **constants, **compilation)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _warps(width: int) -> int:
    """Return the number of warps of a program that loads rows of ``width`` columns."""
    return 4 if width <= 4096 else 8
