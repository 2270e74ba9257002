"""The short causal convolution before a recurrence, and the documents over which it does not reach."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tfla.jax.choice import Offsets
from tfla.jax.gates import widen

BEFORE_ALL = -(2**30)  # the first token of a document that began before the call


class Documents(NamedTuple):
    """The documents of a call over whole sequences."""

    first: Array | None  # (B, T) or (1, T), the first token of each token's document; None: each row is one document
    offsets: Array | None  # (sequences + 1,), of packed sequences
    sequence: Array | None  # (T,), the packed sequence of each token
    token: Array  # (T,)

    @staticmethod
    def of(T: int, document_start: Array | None, cu_seqlens: Offsets | None) -> Documents:
        """Return the documents of T tokens, from the arguments of a mixer."""
        token = jnp.arange(T)
        if cu_seqlens is not None:
            offsets = jnp.asarray(cu_seqlens)
            # Empty sequences share their offset with the next one; the last of them has the token.
            sequence = jnp.clip(jnp.searchsorted(offsets, token, side="right") - 1, 0, len(offsets) - 2)
            return Documents(offsets[sequence][None], offsets, sequence, token)
        if document_start is not None:
            starts = jnp.where(document_start, token, BEFORE_ALL)
            return Documents(jax.lax.cummax(starts, axis=1), None, None, token)
        return Documents(None, None, None, token)

    def first_tokens(self, before: Array | None) -> Array:
        """Return the index of the first token of each token's document, negative where that began before the call.

        Args:
            before: (B,), of packed sequences (sequences,), the tokens of the carried document before the call; None is
                0.

        Returns:
            (B, T), (1, T), (B, 1) or (1, 1) int.
        """
        if self.sequence is not None:
            assert self.first is not None
            return self.first if before is None else self.first - before[self.sequence]
        carried = jnp.zeros((1, 1), self.token.dtype) if before is None else -before[:, None]
        return carried if self.first is None else jnp.where(self.first < 0, carried, self.first)

    def lengths(self, before: Array | None, batch: int) -> Array:
        """Return how many tokens the last document of each row, or each packed sequence, has after the call: (B,)."""
        if self.offsets is not None:
            lengths = self.offsets[1:] - self.offsets[:-1]
            return lengths if before is None else lengths + before
        return jnp.broadcast_to(len(self.token) - self.first_tokens(before)[:, -1], batch)


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel over the last ``size`` tokens of its document, followed by SiLU.

    This is :class:`tfla.nn.mixers.short_convolution.ShortConvolution` on arrays of JAX.

    Args:
        channels: number of channels.
        size: number of tokens that an output depends on.
        bias: whether there is a bias.
        param_dtype: dtype of the weights.
        rngs: the source of the initial weights.
    """

    def __init__(self, channels: int, size: int, bias: bool, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.size = size
        bound = size**-0.5

        def drawn(*shape: int) -> nnx.Param[Array]:
            return nnx.Param(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))

        self.weight = drawn(channels, size)
        self.bias = drawn(channels) if bias else None

    def __call__(self, x: Array, before: Array | None, documents: Documents) -> Array:
        """Convolve whole sequences.

        Args:
            x: (B, T, channels).
            before: (B, size - 1, channels), or of packed sequences (sequences, size - 1, channels): the inputs before
                the first token; None is zeros.
            documents: the documents of the call.

        Returns:
            (B, T, channels) in x's dtype.
        """
        packed, T, last = documents.offsets is not None, x.shape[1], self.size - 1
        inputs, weight = widen(self._inputs(x, None if packed else before)), widen(self.weight[...])
        token = jnp.arange(T)
        y = inputs[:, last:] * weight[:, last]
        for j in range(1, self.size):
            term = inputs[:, last - j : last - j + T] * weight[:, last - j]
            if documents.first is not None:
                term = jnp.where((token - j >= documents.first)[..., None], term, 0)
            if packed and before is not None:
                assert documents.first is not None
                age = token - documents.first[0]
                row = jnp.clip(age - j + last, 0, last - 1)
                carried = widen(before[documents.sequence, row]) * weight[:, last - j]
                term = jnp.where((age < j)[:, None], carried, term)
            y = y + term
        if self.bias is not None:
            y = y + widen(self.bias[...])
        return jax.nn.silu(y).astype(x.dtype)

    def last_inputs(self, x: Array, before: Array | None, documents: Documents) -> Array:
        """Return the inputs before the token after the last one, of the same document: (B, size - 1, channels).

        Of packed sequences they are (sequences, size - 1, channels). Arguments are those of :meth:`__call__`.
        """
        T, back = x.shape[1], jnp.arange(1 - self.size, 0)
        if documents.offsets is None:
            inputs = self._inputs(x, before)[:, T:]
            if documents.first is None:
                return inputs
            return jnp.where((T + back >= documents.first[:, -1:])[..., None], inputs, 0)
        start, end = documents.offsets[:-1, None], documents.offsets[1:, None]
        at = end + back
        here = (at >= start)[..., None]
        older: Any = 0
        if before is not None:
            row = jnp.clip(at - start + self.size - 1, 0, max(self.size - 2, 0))[..., None]
            older = jnp.take_along_axis(before.astype(x.dtype), row, 1)
        return jnp.where(here, x[0, jnp.clip(at, 0, T - 1)], older)

    def _inputs(self, x: Array, before: Array | None) -> Array:
        """Return the inputs before and of the tokens, (B, size - 1 + T, channels)."""
        shape = x.shape[0], self.size - 1, x.shape[2]
        history = jnp.zeros(shape, x.dtype) if before is None else before.astype(x.dtype)
        return jnp.concatenate([history, x], 1)
