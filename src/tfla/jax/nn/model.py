"""The language model as a module of `flax.nnx`: embedding, blocks and unembedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from tfla.jax.checks import check_cu_seqlens
from tfla.jax.choice import Offsets
from tfla.jax.gates import widen
from tfla.jax.nn import pretrained
from tfla.jax.nn.attention import KeyValues
from tfla.jax.nn.layers import projection, rms_norm, soft_cap
from tfla.jax.nn.mixers import MIXERS
from tfla.jax.nn.mlstm import MLSTM
from tfla.jax.nn.recurrent import MixerState
from tfla.jax.rows import is_readable
from tfla.jax.state import State
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import input_std, output_std

# One state for each block.
ModelState = tuple[State | MixerState | KeyValues, ...]


class LanguageModel(nnx.Module):
    """The language model of appendix E.2: embedding, blocks, RMSNorm and an untied unembedding with soft-capped logits.

    This is :class:`tfla.nn.LanguageModel` on arrays of JAX: it reads and writes the same files and gives the same
    logits.

    Args:
        config: the architecture.
        rngs: the source of the initial weights.
        dtype: dtype of activations and of products with weights, such as bfloat16; None is that of the weights. Gates,
            norms and logits are float32 or float64 in any case.
        param_dtype: dtype of the weights.

    Raises:
        TypeError: config is not a ModelConfig.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ) -> None:
        check_config(config, "mlstm_exp", "mlstm_sig", *MIXERS)
        check_dtype("dtype", dtype)
        check_dtype("param_dtype", param_dtype)
        self.config = config
        std = input_std(config.d_model)
        self.embedding = nnx.Embed(
            config.vocab_size, config.d_model, embedding_init=nnx.initializers.normal(std), dtype=dtype,
            param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
        self.blocks = nnx.List(
            [
                Block(config.for_block(n), rngs=rngs, dtype=dtype, param_dtype=param_dtype)
                for n in range(config.num_blocks)
            ]
        )
        self.norm = rms_norm(config.d_model, config.norm_eps, param_dtype, rngs)
        self.unembedding = projection(config.d_model, config.vocab_size, std, dtype, param_dtype, rngs)

    @overload
    def __call__(
        self, ids: Array, state: ModelState | None = ..., *, document_start: Array | None = ...,
        cu_seqlens: Offsets | None = ..., return_state: Literal[False] = ..., context_parallel: str | None = ...,
    ) -> Array: ...  # fmt: skip
    @overload
    def __call__(
        self, ids: Array, state: ModelState | None = ..., *, document_start: Array | None = ...,
        cu_seqlens: Offsets | None = ..., return_state: Literal[True], context_parallel: str | None = ...,
    ) -> tuple[Array, ModelState]: ...  # fmt: skip
    def __call__(
        self,
        ids: Array,
        state: ModelState | None = None,
        *,
        document_start: Array | None = None,
        cu_seqlens: Offsets | None = None,
        return_state: bool = False,
        context_parallel: str | None = None,
    ) -> Array | tuple[Array, ModelState]:
        """Return, for each token, the logits of the token after it.

        Args:
            ids: (B, T) int tokens, T >= 1. Arrays on a CPU that are not traced are checked against the vocabulary.
            state: the state that an earlier call returned, or :meth:`initial_state`; None is the start of a document.
            document_start: (B, T) bool, True at the first token of each document. A document does not depend on the
                tokens before it: the mLSTM's forget gate is closed there.
            cu_seqlens: (num_sequences + 1,) int, for B = 1: the offsets of the packed sequences, from 0 to T. A state
                then has a row per sequence.
            return_state: whether to return the state after the last token.
            context_parallel: the mesh axis over which the sequence is divided, as in :func:`tfla.jax.mlstm`.

        Returns:
            logits (B, T, vocab_size), soft-capped, float32 or float64; with return_state also the state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_ids(ids, "(B, T)", 2, self.config.vocab_size)
        if document_start is not None and cu_seqlens is not None:
            raise ValueError("document_start: got it together with cu_seqlens, expected at most one of them")
        if document_start is not None and document_start.shape != ids.shape:
            raise ValueError(
                f"document_start: got shape {document_start.shape}, expected that of ids, {tuple(ids.shape)}"
            )
        if cu_seqlens is not None and context_parallel is None:
            check_cu_seqlens(cu_seqlens, ids, name="ids")
        before = self._check_state(state)
        x, after = self.embedding(ids), []
        for block, old in zip(self.blocks, before, strict=True):
            x, new = block(
                x, old, document_start=document_start, cu_seqlens=cu_seqlens, return_state=return_state,
                context_parallel=context_parallel,
            )  # fmt: skip
            after.append(new)
        logits = self.logits(x)
        return (logits, tuple(after)) if return_state else logits

    def logits(self, hidden: Array) -> Array:
        """Apply the last norm, the unembedding and the soft cap, (110) of the paper.

        Args:
            hidden: the residual stream after the last block, (..., d_model).

        Returns:
            the logits (..., vocab_size), float64 if the weights are float64, else float32.
        """
        return soft_cap(widen(self.unembedding(self.norm(hidden))), self.config.logit_soft_cap)

    def step(self, ids: Array, state: ModelState) -> tuple[Array, ModelState]:
        """Advance every sequence by one token.

        Args:
            ids: (B,) int tokens.
            state: the state before the tokens.

        Returns:
            logits (B, vocab_size), equal to those of a call over whole sequences, and the new state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """
        check_ids(ids, "(B,)", 1, self.config.vocab_size)
        if state is None:
            raise TypeError("state: got NoneType, expected a tuple with one entry a block")
        x, after = self.embedding(ids), []
        for number, (block, old) in enumerate(zip(self.blocks, self._check_state(state), strict=True)):
            if old is None:
                raise TypeError(f"state[{number}]: got NoneType, expected the state of a block")
            x, new = block.step(x, old)
            after.append(new)
        return self.logits(x), tuple(after)

    def initial_state(self, batch_size: int) -> ModelState:
        """Return the state before the first token of `batch_size` sequences: a tuple with an entry per block."""
        return tuple(block.mixer.initial_state(batch_size) for block in self.blocks)

    def num_parameters(self) -> int:
        """Return the number of parameters, frozen ones included."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self)))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors into a directory, which :mod:`tfla.nn` loads too.

        Args:
            directory: the directory, which is created if needed.

        Raises:
            ValueError: the directory holds a run of ``tfla train``, whose config.json would be replaced.
            ImportError: safetensors is not installed.
            OSError: the directory cannot be written.
        """
        pretrained.save(self, directory)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: Any = None, param_dtype: Any = None, **overrides: Any
    ) -> LanguageModel:
        """Load the model that ``save_pretrained`` of this class or of :class:`tfla.nn.LanguageModel` wrote.

        Args:
            directory: the directory of the model.
            dtype: dtype of activations and of products with weights; None is that of the weights.
            param_dtype: dtype of the weights; None is the stored one.
            overrides: fields of the config to replace, such as ``chunk_size=None``.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: a file is broken, or the weights do not fit the config.
            ImportError: safetensors is not installed.
        """
        check_dtype("dtype", dtype)
        check_dtype("param_dtype", param_dtype)
        return pretrained.load(cls, directory, dtype, param_dtype, overrides)

    def _check_state(self, state: ModelState | None) -> tuple[State | MixerState | KeyValues | None, ...]:
        """Return one state or None for each block; ValueError if there are not as many."""
        if state is None:
            return (None,) * len(self.blocks)
        if not isinstance(state, tuple | list) or isinstance(state, State | MixerState | KeyValues):
            raise TypeError(f"state: got {type(state).__name__}, expected a tuple with one entry a block")
        if len(state) != len(self.blocks):
            raise ValueError(f"state: got {len(state)} entries, expected one for each of the {len(self.blocks)} blocks")
        return tuple(state)


class Block(nnx.Module):
    """A block of appendix E.2: x + MIX(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ) -> None:
        self.mixer_norm = rms_norm(config.d_model, config.norm_eps, param_dtype, rngs)
        mixer: Any = MIXERS.get(config.mixer, MLSTM)
        self.mixer = mixer(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.ffn_norm = rms_norm(config.d_model, config.norm_eps, param_dtype, rngs)
        self.ffn = SwiGLU(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)

    def __call__(self, x: Array, state: Any = None, **options: Any) -> tuple[Array, Any]:
        """Run the block on whole sequences, with the options of :meth:`MLSTM.__call__`."""
        mixed, new = self.mixer(self.mixer_norm(x).astype(x.dtype), state, **options)
        return self._add_residuals(x, mixed), new

    def step(self, x: Array, state: Any) -> tuple[Array, Any]:
        """Run the block on one token of each sequence, as :meth:`MLSTM.step`."""
        mixed, new = self.mixer.step(self.mixer_norm(x).astype(x.dtype), state)
        return self._add_residuals(x, mixed), new

    def _add_residuals(self, x: Array, mixed: Array) -> Array:
        """Add the output of the mixer to the residual stream, then that of the feed-forward network."""
        x = x + mixed.astype(x.dtype)
        return x + self.ffn(self.ffn_norm(x).astype(x.dtype)).astype(x.dtype)


class SwiGLU(nnx.Module):
    """The feed-forward network W_down (silu(W_gate x) * W_up x) (Shazeer, 2020) on x (..., d_model), without biases."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ) -> None:
        d, hidden = config.d_model, config.ffn_dim
        options = (dtype, param_dtype, rngs)
        self.gate_proj = projection(d, hidden, input_std(d), *options)
        self.up_proj = projection(d, hidden, input_std(d), *options)
        self.down_proj = projection(hidden, d, output_std(d, config.num_blocks), *options)

    def __call__(self, x: Array) -> Array:
        """Return the output (..., d_model) for x (..., d_model)."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def check_ids(ids: Any, shape: str, dims: int, vocab_size: int) -> None:
    """Raise unless ids is an integer array with ``dims`` dimensions, none of them empty but the first.

    Values that the host reads without waiting have to be in the vocabulary.
    """
    if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.integer):
        got = f"an array of {ids.dtype}" if hasattr(ids, "dtype") else type(ids).__name__
        raise TypeError(f"ids: got {got}, expected an array of integers")
    if ids.ndim != dims:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected {shape}")
    if dims > 1 and ids.shape[1] < 1:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected T of at least 1")
    if ids.size and is_readable(ids):
        low, high = int(np.min(ids)), int(np.max(ids))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"ids: got tokens from {low} to {high}, expected from 0 to {vocab_size - 1}, the vocabulary"
            )


def check_dtype(name: str, dtype: Any) -> None:
    """Raise TypeError unless dtype is None or a float dtype of JAX."""
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(f"{name}: got {dtype!r}, expected a float dtype or None")
