"""The language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from tfla._util.device import check_device
from tfla.nn import pretrained
from tfla.nn.arguments import check_ids, check_int, check_vocabulary, kind_of
from tfla.nn.attention import KeyValues
from tfla.nn.block import Block
from tfla.nn.config import ModelConfig
from tfla.nn.layers import Projection, at_least_float32, input_std, soft_cap
from tfla.nn.states import check_entries
from tfla.ops.state import State

# One entry a block: tfla.State for the mLSTM, KeyValues for attention.
ModelState = tuple[State | KeyValues, ...]


class LanguageModel(nn.Module):
    """Embedding, blocks, RMSNorm and an untied unembedding with soft-capped logits (appendix E.2, (110)).

    The same logits come from one call over whole sequences, from calls over pieces that hand on the state, and from
    :meth:`step` token by token.

    Args:
        config: what it is made of. Weights start as :mod:`tfla.nn.layers` says, from torch's global generator.

    Raises:
        TypeError: config is no ModelConfig.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config: got {type(config).__name__}, expected a ModelConfig")
        self.config = config
        std = input_std(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=std)
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config) for _ in range(config.num_blocks))  # type: ignore[assignment]
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.unembedding = Projection(config.d_model, config.vocab_size, std)

    def hidden(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Everything but the unembedding: :meth:`logits` of its first result are those of :meth:`forward`.

        For callers that cannot hold (B, T, vocab_size) logits at once. Arguments and errors of :meth:`forward`.

        Returns:
            (B, T, d_model) in the dtype of the residual stream, and the state behind the last token, empty unless
            return_state.
        """
        self._check(ids, state, document_start, cu_seqlens)
        x = self._embed(ids)
        states = []
        for block, before in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            x, after = block(x, before, document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state)
            states.append(after)
        return x, tuple(states) if return_state else ()

    def logits(self, hidden: Tensor) -> Tensor:
        """RMSNorm, unembedding and soft-cap (110): (..., d_model) -> (..., vocab_size), float32 or better."""
        logits = self.unembedding(self.norm(hidden))
        return soft_cap(at_least_float32(logits), self.config.logit_soft_cap)

    @overload
    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = ...,
        *,
        document_start: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = ...,
        *,
        document_start: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, ModelState]: ...
    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """Logits of the token that follows each token.

        Args:
            ids: (B, T) int64 tokens, T >= 1. On a CPU they are checked against the vocabulary; on a GPU they are not
                read, so that nothing waits for it, and must be right.
            state: what an earlier call returned, or :meth:`initial_state`; None is the start of a document.
            document_start: (B, T) bool, True at documents' first tokens, which see nothing before them: the mLSTM's
                forget gate is closed there. A carried state belongs to the document that goes on.
            cu_seqlens: (sequences + 1,) int, for B = 1: where packed sequences start and, last, T. An mLSTM's state
                then holds one row for each sequence; attention takes and gives none.
            return_state: also return the state behind the last token.

        Returns:
            logits (B, T, vocab_size), soft-capped, float32 or better; with return_state also the state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
        """
        x, new = self.hidden(
            ids, state, document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state
        )
        logits = self.logits(x)
        return (logits, new) if return_state else logits

    def step(self, ids: Tensor, state: ModelState, *, in_place: bool = False) -> tuple[Tensor, ModelState]:
        """One token a sequence: ids (B,) int64 -> logits (B, vocab_size), as :meth:`forward` gives, and the new state.

        in_place lets the mLSTM overwrite its C, as :func:`tfla.mlstm_step` does; the old state is then of no use.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
        """
        check_ids(ids, "(B,)", 1)
        check_entries(state, len(self.blocks))
        x = self._embed(ids)
        states = []
        for block, before in zip(self.blocks, state, strict=True):
            x, after = block.step(x, before, in_place)
            states.append(after)
        return self.logits(x), tuple(states)

    def initial_state(self, batch_size: int, device: torch.device | str | None = None) -> ModelState:
        """The state before the first token of batch_size sequences: one tuple entry a block, on the model's device.

        It is a pytree of tensors: constant in size for the mLSTM, growing with every token for attention.

        Raises:
            TypeError, ValueError: batch_size is no int of at least 1, or there is no such device here.
        """
        check_int("batch_size", batch_size, 1)
        at = self.embedding.weight.device if device is None else check_device(device)
        return tuple(block.mixer.initial_state(batch_size, at) for block in self.blocks)

    def num_parameters(self) -> int:
        """How many numbers the weights are, frozen ones included."""
        return sum(p.numel() for p in self.parameters())

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors into a directory, which is made if it is not there.

        Each file is replaced in one go: a crash leaves the old one or the new one.

        Raises:
            ImportError: safetensors is not installed.
            OSError: the directory cannot be written.
        """
        pretrained.save(self, directory)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> LanguageModel:
        """The model that :meth:`save_pretrained` wrote.

        Args:
            directory: where it is.
            device: to put it on; None is the CPU.
            dtype: of the weights; None is the stored one.
            overrides: fields of the config to change, such as ``backend=None`` on another machine.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: a file is broken, or the weights do not fit the config; the message names it. Or there is no
                such device here, weights cannot be in that dtype, or the directory has a model of another layout, such
                as xLSTM-7B's, which :func:`tfla.integrations.transformers.load_xlstm` loads.
            ImportError: safetensors is not installed.
        """
        return pretrained.load(cls, directory, device, dtype, overrides)

    def _embed(self, ids: Tensor) -> Tensor:
        """Look the tokens up: (...) -> (..., d_model); ValueError names tokens that there are not, on a CPU."""
        try:
            return self.embedding(ids)
        except IndexError:
            check_vocabulary(ids, self.config.vocab_size)
            raise

    def _check(
        self, ids: Tensor, state: ModelState | None, document_start: Tensor | None, cu_seqlens: Tensor | None
    ) -> None:
        check_ids(ids, "(B, T)", 2)
        if ids.shape[1] < 1:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected T of at least 1")
        if state is not None:
            check_entries(state, len(self.blocks))
        if document_start is None:
            return
        if cu_seqlens is not None:
            raise ValueError("document_start: got it together with cu_seqlens, expected at most one of them")
        if not isinstance(document_start, Tensor) or document_start.dtype != torch.bool:
            raise TypeError(f"document_start: got {kind_of(document_start)}, expected a bool tensor")
        if document_start.shape != ids.shape:
            raise ValueError(
                f"document_start: got shape {tuple(document_start.shape)}, expected that of ids, {tuple(ids.shape)}"
            )
