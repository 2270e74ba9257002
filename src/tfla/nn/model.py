"""The language model: embedding, blocks and unembedding.

:mod:`tfla.nn.block` has the blocks, :mod:`tfla.nn.mixers` a file for each of their sequence mixers, and
:mod:`tfla.nn.layers` the layers that they share. A model runs in three ways: over whole sequences (``forward``), by
one token of each sequence (``step``), and by a few proposed tokens of which some are accepted later (``steps``). Each
block and each mixer has the same three methods. Equation numbers and appendix E.2 are those of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from tfla._util.device import check_device
from tfla.nn import batch_invariance, capped_loss, pool, pretrained
from tfla.nn.block import Block
from tfla.nn.config import ModelConfig
from tfla.nn.layers import Unembedding, at_least_float32, input_std, recomputed
from tfla.nn.mixer_state import MixerState, StatesEvery
from tfla.nn.mixers.key_values import KeyValues
from tfla.nn.soft_cap import soft_cap
from tfla.nn.validation import check_ids, check_inputs, check_int, check_num_entries, check_state_of_call, embed
from tfla.ops.checks import LONGEST_STEPS, check_flags, check_lengths
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows

TOKENS_PER_PASS = 4096  # tokens whose logits `LanguageModel.losses` holds at once

# One entry per block: tfla.State for the mLSTM, KeyValues for attention, MixerState for the other mixers.
ModelState = tuple[State | KeyValues | MixerState, ...]


class LanguageModel(nn.Module):
    """The language model of appendix E.2: embedding, blocks, RMSNorm and an untied unembedding with soft-capped logits.

    One call over whole sequences, calls over consecutive parts that pass the state on, and :meth:`step` token by token
    give the same logits.

    Args:
        config: the architecture. Weights are drawn from torch's global generator with the standard deviations of
            :func:`~tfla.nn.layers.input_std` and :func:`~tfla.nn.layers.output_std`.

    Raises:
        TypeError: config is not a ModelConfig.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config: got {type(config).__name__}, expected a ModelConfig")
        self.config = config
        std = input_std(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=std)
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(config, index) for index in range(config.num_blocks)
        )
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.unembedding = Unembedding(config.d_model, config.vocab_size, std)
        if config.batch_invariant:
            batch_invariance.make_batch_invariant(self)

    def hidden(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Return the residual stream after the last block, for callers that cannot hold all logits at once.

        ``logits(hidden(ids)[0])`` equals ``forward(ids)``. Arguments and errors are those of :meth:`forward`.

        Args:
            state_indices: (B,) int32 or int64, or one for each packed sequence: ``state`` is a pool, that is a state
                with any number of rows, of which each sequence continues the one at its index. With return_state
                the rows are overwritten, and the pool is returned. A sequence at -1 starts from zero and writes
                nothing. Each row may occur once; on a CPU, indices that do not fit are an error. Gradients must not be
                recorded.

        Returns:
            the residual stream (B, T, d_model), and the state after the last token, which is empty without
            return_state.
        """
        check_inputs(ids, state, len(self.blocks), document_start, cu_seqlens)
        check_flags(return_state=return_state)
        x = embed(self.embedding, ids)
        rows = self._find_rows(state, state_indices, ids.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
        if rows is not None and return_state:
            self._check_room(state, rows, ids, document_start, cu_seqlens)
        states: list[Any] = []
        for block, before in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            x, after = _run(
                block, x, before, rows, return_state, document_start=document_start, cu_seqlens=cu_seqlens
            )  # fmt: skip
            states.append(after)
        return x, tuple(states) if return_state else ()

    def prefill(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        states_every: int,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, ModelState, list[ModelState]]:
        """Read prompts, and return the states after every so many tokens too, for a cache of prefixes.

        Each token is computed once. The recurrences run over ``states_every`` tokens at a time, which on a GPU should
        be a few hundred; all else runs over whole prompts.

        Args:
            ids: (B, T) int64 tokens, T >= 1.
            state: the state before the first token, as :meth:`forward` takes it.
            states_every: the number of tokens n between two states.
            state_indices: (B,), as in :meth:`hidden`: the row of each sequence in ``state``, which is then a pool.
                These rows are overwritten.

        Returns:
            the residual stream (B, T, d_model) after the last block; the state after the last token, or the pool;
            and those after n, 2 n, ... tokens, T // n of them. The latter keep no tensor of the whole call alive, but
            for attention, where they are views of one cache.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_int("states_every", states_every, 1)
        check_inputs(ids, state, len(self.blocks))
        x, last, between = embed(self.embedding, ids), [], []
        rows = self._find_rows(state, state_indices, ids.shape[0])
        if rows is not None:
            self._check_room(state, rows, ids, None, None)
        for block, before in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            wanted = StatesEvery(states_every)
            x, after = _run(block, x, before, rows, True, states_every=wanted)
            last.append(after)
            between.append(wanted.states)
        return x, tuple(last), list(zip(*between, strict=True))

    def read_prompt(self, ids: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Read tokens, and compute the logits of the token after the last of them alone.

        Args:
            ids: (B, T) int64 tokens, T >= 1.
            state: the state before the first token, as :meth:`forward` takes it.

        Returns:
            logits (B, vocab_size), and the state after the last token.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        hidden, state = self.hidden(ids, state, return_state=True)
        return self.logits(hidden[:, -1]), state

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the last norm, the unembedding and the soft cap, (110) of the paper.

        Args:
            hidden: the residual stream after the last block, (..., d_model), as :meth:`hidden` returns it.

        Returns:
            the logits (..., vocab_size), float64 if the weights are float64, else float32.
        """
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
        """Return, for each token, the logits of the token after it.

        Args:
            ids: (B, T) int64 tokens, T >= 1. On a CPU their values are checked against the vocabulary; on a GPU that
                would be a synchronization, so they must be valid.
            state: the state that an earlier call returned, or :meth:`initial_state`; None is the start of a document.
            document_start: (B, T) bool, True at the first token of each document. A document does not depend on the
                tokens before it: the forget gates of recurrent mixers are closed there. A state belongs to the document
                that the first tokens continue.
            cu_seqlens: (num_sequences + 1,) int, for B = 1: the offsets of the packed sequences, from 0 to T. The
                state then has a row per sequence; attention returns one, but takes none.
            return_state: whether to return the state after the last token.

        Returns:
            logits (B, T, vocab_size), soft-capped, float32 or float64; with return_state also the state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        x, new = self.hidden(
            ids, state, document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state
        )
        logits = self.logits(x)
        return (logits, new) if return_state else logits

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        tokens_per_pass: int = TOKENS_PER_PASS,
        recompute: bool = True,
    ) -> Tensor:
        """Return the cross-entropy of each target without holding the logits of all tokens at once.

        With ``recompute`` the logits of ``tokens_per_pass`` tokens are computed at a time, and again in the backward.
        On a GPU one kernel computes soft cap and cross-entropy, from logits in the dtype of the unembedding's result.
        With a vocabulary of 50,257 tokens and bfloat16, logits take 0.1 MB a token, and their gradient as much. Where
        the kernel does not run, on a CPU or under torch.compile, float32 intermediates take up to 0.8 MB a token.

        Args:
            ids: (B, T) int64 tokens, as in :meth:`forward`.
            targets: (B, T) int64, the token after each of them.
            document_start: as in :meth:`forward`.
            cu_seqlens: as in :meth:`forward`.
            tokens_per_pass: the number of tokens whose logits are held at once.
            recompute: whether logits are computed again in the backward; False holds those of all tokens until then.

        Returns:
            the losses in nats (B, T), float32 or float64.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_int("tokens_per_pass", tokens_per_pass, 1)
        check_flags(recompute=recompute)
        check_inputs(ids, None, len(self.blocks), document_start, cu_seqlens)
        check_ids(targets, "(B, T)", 2, name="targets")
        if targets.shape != ids.shape:
            raise ValueError(f"targets: got shape {tuple(targets.shape)}, expected that of ids, {tuple(ids.shape)}")
        x, _ = self.hidden(ids, document_start=document_start, cu_seqlens=cu_seqlens)
        hidden, following = x.flatten(0, 1), targets.flatten()
        if not recompute:
            return self.losses_of_hidden(hidden, following).view(targets.shape).clone()
        parts = zip(hidden.split(tokens_per_pass), following.split(tokens_per_pass), strict=True)
        losses = torch.cat([recomputed(self.losses_of_hidden, *part) for part in parts])
        return losses.view(targets.shape).clone()  # no view, since FSDP2 warns about results that are views

    def losses_of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of targets from the residual stream after the last block.

        Args:
            hidden: (N, d_model), the residual stream at N tokens, from :meth:`hidden`.
            targets: (N,) int64, the token that follows each of them.

        Returns:
            the losses in nats (N,), float32 or float64.
        """
        return capped_loss.losses(self.unembedding(self.norm(hidden)), targets, self.config.logit_soft_cap)

    def step(
        self, ids: Tensor, state: ModelState, *, in_place: bool = False, state_indices: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Advance every sequence by one token.

        Forward hooks of blocks and mixers are not called, since their forward does not run.

        Args:
            ids: (B,) int64 tokens.
            state: the state before the tokens.
            in_place: let recurrent mixers overwrite C of ``state``, as :func:`tfla.mlstm_step` does. The old state must
                not be used afterwards.
            state_indices: (B,), as in :meth:`hidden`: the row of each sequence in ``state``, which is then a pool.
                These rows are overwritten in place, and the pool is returned.

        Returns:
            logits (B, vocab_size), equal to those of :meth:`forward`, and the new state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_ids(ids, "(B,)", 1)
        check_flags(in_place=in_place)
        check_num_entries(state, len(self.blocks))
        x = embed(self.embedding, ids)
        rows = self._find_rows(state, state_indices, ids.shape[0])
        pool.check_room_for_steps(state, rows, 1)
        states = []
        for block, before in zip(self.blocks, state, strict=True):
            x, after = block.step(x, before, in_place, rows)
            states.append(after)
        return self.logits(x), tuple(states)

    def steps(
        self, ids: Tensor, state: ModelState, *, in_place: bool = False, state_indices: Tensor | None = None
    ) -> tuple[Tensor, Callable[[Tensor], ModelState]]:
        """Compute the logits of a few proposed tokens of every sequence, of which some are accepted later.

        A recurrent mixer reads its state once for all tokens and once more to accept some of them. Attention needs a
        cache with room for the tokens, see :meth:`tfla.nn.KeyValues.reserve`.

        Args:
            ids: (B, T) int64 tokens, T from 1 to 32.
            state: the state before the tokens.
            in_place: let mixers overwrite ``state`` when tokens are accepted. Until then it stays as it is, but for
                places of caches that hold no token.
            state_indices: (B,), as in :meth:`hidden`: the row of each sequence in ``state``, which is then a pool.
                These rows are overwritten when tokens are accepted.

        Returns:
            logits (B, T, vocab_size), equal to those of :meth:`forward`, and a function that may be called once: from
            ``lengths`` (B,) int, 0 to T, on the device of ids to the state after so many tokens of each sequence.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_inputs(ids, state, len(self.blocks))
        check_flags(in_place=in_place)
        if ids.shape[1] > LONGEST_STEPS:
            raise ValueError(f"ids: got T = {ids.shape[1]}, expected from 1 to {LONGEST_STEPS} tokens")
        check_num_entries(state, len(self.blocks))
        x, accepts = embed(self.embedding, ids), []
        rows = self._find_rows(state, state_indices, ids.shape[0])
        pool.check_room_for_steps(state, rows, ids.shape[1])
        for block, before in zip(self.blocks, state, strict=True):
            x, accept = block.steps(x, before, in_place, rows)
            accepts.append(accept)
        overwrites, accepted = in_place or rows is not None, False

        def accept_all(lengths: Tensor) -> ModelState:
            """Return the state after some of the tokens."""
            nonlocal accepted
            if not isinstance(lengths, Tensor):
                raise TypeError(f"lengths: got {type(lengths).__name__}, expected an int32 or int64 tensor")
            check_lengths(lengths, ids, name="ids")
            if accepted and overwrites:
                raise ValueError("accept: got a second call, expected one: the first has overwritten the state")
            accepted = True
            return tuple(accept(lengths) for accept in accepts)

        return self.logits(x), accept_all

    def initial_state(
        self, batch_size: int, device: torch.device | str | None = None, *, capacity: int | None = None
    ) -> ModelState:
        """Return the state before the first token: a tuple with an entry per block.

        It is a pytree of tensors. Its size grows with every token for attention, and is constant for all other mixers.

        Args:
            batch_size: number of sequences.
            device: device of the tensors; None is the model's.
            capacity: the number of tokens of a sequence for which caches of attention have room from the start, as a
                pool needs them; None lets them grow.

        Raises:
            TypeError, ValueError: batch_size or capacity is not an int of at least 1, or this machine has no such
                device.
        """
        check_int("batch_size", batch_size, 1)
        if capacity is not None:
            check_int("capacity", capacity, 1)
        at = self.embedding.weight.device if device is None else check_device(device)
        states = tuple(block.mixer.initial_state(batch_size, at) for block in self.blocks)
        return states if capacity is None else tuple(pool.with_room(state, capacity) for state in states)

    def num_parameters(self) -> int:
        """Return the number of parameters, frozen ones included."""
        return sum(p.numel() for p in self.parameters())

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors into a directory, which is created if needed.

        Each file is replaced atomically: a crash leaves the old one or the new one.

        Args:
            directory: the directory.

        Raises:
            ValueError: the directory holds a run of ``tfla train``, whose config.json would be replaced.
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
        """Load the model that :meth:`save_pretrained` wrote.

        Args:
            directory: the directory of the model.
            device: device of the weights; None is the CPU.
            dtype: dtype of the weights; None is the stored one.
            overrides: fields of the config to replace, such as ``backend=None`` on another machine.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: a file is broken or the weights do not fit the config, this machine has no such device, weights
                cannot have that dtype, or the directory holds a model of another layout, such as xLSTM-7B's, which
                :func:`tfla.integrations.transformers.load_xlstm` loads.
            ImportError: safetensors is not installed.
        """
        return pretrained.load(cls, directory, device, dtype, overrides)

    def _find_rows(self, state: ModelState | None, state_indices: Tensor | None, sequences: int) -> PoolRows | None:
        """Check the state of a call; return the rows of a pool that its sequences have, None without state_indices."""
        rows = None if state_indices is None else pool.find_rows(state, state_indices, sequences)
        if state is not None:
            check_state_of_call(self, state, sequences if rows is None else None)
        return rows

    def _check_room(
        self, state: ModelState | None, rows: PoolRows, ids: Tensor, document_start: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:  # fmt: skip
        """Raise unless the rows of a pool have room for prompts, see :func:`pool.check_room_for_prompts`."""
        windows = [getattr(block.mixer, "window", None) for block in self.blocks]
        assert state is not None
        pool.check_room_for_prompts(state, rows, windows, ids, document_start, cu_seqlens)


def _run(
    block: Block, x: Tensor, state: Any, rows: PoolRows | None, return_state: bool, **options: Any
) -> tuple[Tensor, Any]:
    """Run a block on whole sequences from a state or, with rows, from these rows of a pool, which it overwrites.

    The rows are gathered before the block and scattered after it if the mixer does not read them itself.
    """
    if rows is None or block.mixer.reads_rows:
        return block(x, state, rows=rows, return_state=return_state, **options)
    x, after = block(x, pool.read(state, rows), return_state=return_state, **options)
    if return_state:
        pool.write(state, rows, after)
    return x, state
