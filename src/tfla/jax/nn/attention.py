"""Causal attention with rotary position embeddings, as a module of `flax.nnx`."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from tfla.jax.checks import check_context_parallel, check_cu_seqlens
from tfla.jax.choice import Offsets
from tfla.jax.nn.attend import attend, masked
from tfla.jax.nn.layers import projection
from tfla.jax.nn.recurrent import by_heads, input_projection
from tfla.jax.nn.rotary import rotate_both
from tfla.jax.nn.short_convolution import Documents
from tfla.jax.spans import of_last_device
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import output_std


class KeyValues(NamedTuple):
    """The state of :class:`Attention`: keys and values of all S tokens so far, or of the last ones for a window.

    Without :meth:`reserve` a step returns a larger state, for which a jitted step is compiled again.
    """

    k: Array
    """(B, S, kv heads, head_dim), rotated."""
    v: Array
    """(B, S, kv heads, head_dim)."""
    start: Array | None = None
    """(B,) int32, the index in S of the first token of the current document, negative where a window has dropped it;
    None is 0 everywhere."""
    length: Array | None = None
    """(B,) int32, the number of cached tokens of each sequence, after which there is room for more; None is S."""

    def tokens(self) -> Array:
        """Return the number of tokens (B,) of the current document so far."""
        cached = self.length
        if cached is None:
            cached = jnp.full(self.k.shape[0], self.k.shape[1], jnp.int32)
        return cached if self.start is None else cached - self.start

    def reserve(self, capacity: int) -> KeyValues:
        """Return a state with room for ``capacity`` tokens of each sequence, whose shape no step changes.

        Each sequence has the tokens of its document from its first place on, whatever is before them in this state. A
        step of a sequence without room yields NaN, and stores nothing.

        Args:
            capacity: the number of tokens that each sequence has room for.

        Raises:
            ValueError: the state has more places already.
        """
        B, S = self.k.shape[:2]
        if capacity < S:
            raise ValueError(f"capacity: got {capacity}, expected at least {S}, the places of the state")
        k, v = (jnp.pad(x, ((0, 0), (0, capacity - S), (0, 0), (0, 0))) for x in (self.k, self.v))
        length = jnp.full(B, S, jnp.int32) if self.length is None else self.length
        if self.start is None:
            return KeyValues(k, v, jnp.zeros(B, jnp.int32), length)
        before = jnp.maximum(self.start, 0)
        token = jnp.minimum(before[:, None] + jnp.arange(capacity), capacity - 1)[..., None, None]
        k, v = (jnp.take_along_axis(x, token, axis=1) for x in (k, v))
        return KeyValues(k, v, jnp.minimum(self.start, 0), length - before)


jax.export.register_namedtuple_serialization(KeyValues, serialized_name="tfla.jax.nn.KeyValues")


class Sinks(nnx.Module):
    """The logits of the attention sinks, one for each head, which start at 0."""

    def __init__(self, num_heads: int, param_dtype: Any) -> None:
        self.logits = nnx.Param(jnp.zeros(num_heads, param_dtype))


class Attention(nnx.Module):
    """Causal attention within documents, softmax(q k^T / sqrt(d)) v, with rotated queries and keys; no biases.

    This is :class:`tfla.nn.Attention` on arrays of JAX, with its ``num_kv_heads``, ``window`` and ``attention_sinks``.
    XLA compiles it on every device, in blocks of queries.

    Args:
        config: a config with mixer "attention".
        rngs: the source of the initial weights.
        dtype: dtype of activations and of products with weights; None is that of x and the weights.
        param_dtype: dtype of the weights.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    name: ClassVar[str] = "attention"

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ) -> None:
        check_config(config, self.name)
        d, heads = config.d_model, config.num_heads
        self.head_dim, self.window, self.rope_base = config.head_dim, config.window, config.rope_base
        self.num_kv_heads = heads if config.num_kv_heads is None else config.num_kv_heads
        self.param_dtype = param_dtype
        options = dtype, param_dtype, rngs
        keys = self.num_kv_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (input_projection(d, n, options) for n in (d, keys, keys))
        self.sinks = Sinks(heads, param_dtype) if config.attention_sinks else None
        self.out_proj = projection(d, d, output_std(d, config.num_blocks), *options)

    def __call__(
        self,
        x: Array,
        state: KeyValues | None = None,
        *,
        document_start: Array | None = None,
        cu_seqlens: Offsets | None = None,
        return_state: bool = False,
        context_parallel: str | None = None,
    ) -> tuple[Array, KeyValues | None]:
        """Mix whole sequences; arguments and results are those of :meth:`tfla.jax.nn.MLSTM.__call__`.

        With context_parallel a state is the same on all devices: it has the keys and values of all their steps.

        Raises:
            TypeError, ValueError: cu_seqlens is given together with a state or with document_start, a state has room
                for more tokens, or context_parallel is no axis of a `jax.shard_map` around the call.
        """
        if document_start is not None and cu_seqlens is not None:
            raise ValueError("document_start: got it together with cu_seqlens, expected at most one of them")
        check_context_parallel(context_parallel)
        q, k, v = self._queries_keys_values(x)
        T, own = x.shape[1], jnp.arange(x.shape[1])
        if context_parallel is not None:
            own += jax.lax.axis_index(context_parallel) * T
            T *= jax.lax.axis_size(context_parallel)
            document_start, v = (_gathered(t, context_parallel) for t in (document_start, v))
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, q, context_parallel)
            if state is not None:
                raise ValueError("cu_seqlens: got it with a state, expected no state in attention")
        before, past = None, 0
        if state is not None:
            check_state(state, k)
            if state.length is not None:
                raise ValueError("state: got one with room for more tokens, expected one that a call has returned")
            before, past = state.tokens(), state.k.shape[1]
        documents = Documents.of(T, document_start, cu_seqlens)
        first = documents.first_tokens(before)
        offset = first if first.shape[1] == 1 else first[:, own]
        q, k = rotate_both(q, k, own - offset, self.rope_base)
        if context_parallel is not None:
            k = _gathered(k, context_parallel)
        if state is not None:
            k, v = (jnp.concatenate([old.astype(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        h = attend(q, k, v, own[0] + past, offset + past, self.window, self._sinks())
        y = self.out_proj(h.reshape(x.shape))
        if not return_state:
            return y, None
        if cu_seqlens is not None:
            new = self._packed_state(k, v, cu_seqlens)
        else:
            is_whole = document_start is None and (state is None or state.start is None)
            new = self._new_state(k, v, None if is_whole else first[:, -1] + past)
        # All devices have gathered the same state, but not so that the types of `jax.shard_map` say it.
        return y, new if context_parallel is None else of_last_device(new, context_parallel)

    def step(self, x: Array, state: KeyValues) -> tuple[Array, KeyValues]:
        """Mix one token of each sequence.

        Args:
            x: the token's activations, (B, d_model).
            state: the cache so far, with room for the token.

        Returns:
            the output (B, d_model), and the cache with the token.
        """
        if not isinstance(state, KeyValues) or state.length is None:
            y, grown = self(x[:, None], state, return_state=True)
            assert grown is not None
            return y[:, 0], grown
        q, k, v = self._queries_keys_values(x[:, None])
        check_state(state, k)
        q, k = rotate_both(q, k, state.tokens()[:, None], self.rope_base)
        rows, place = jnp.arange(x.shape[0]), state.length
        k, v = (cache.at[rows, place].set(new[:, 0], mode="drop") for cache, new in ((state.k, k), (state.v, v)))
        token, start = jnp.arange(k.shape[1]), state.start
        visible = token <= place[:, None]
        if start is not None:
            visible &= token >= start[:, None]
        if self.window is not None:
            visible &= token > place[:, None] - self.window
        sinks = self._sinks()
        group = q.shape[2] // self.num_kv_heads
        h = masked(
            q.reshape(*q.shape[:2], self.num_kv_heads, group, self.head_dim), k.astype(q.dtype), v.astype(q.dtype),
            visible[:, None], None if sinks is None else sinks.reshape(self.num_kv_heads, -1, 1, 1),
        )  # fmt: skip
        h = jnp.where((place < k.shape[1])[:, None], h.reshape(x.shape), jnp.nan)
        return self.out_proj(h), KeyValues(k, v, start, place + 1)

    def initial_state(self, batch_size: int) -> KeyValues:
        """Return the cache of `batch_size` sequences without tokens, in the weights' dtype."""
        empty = jnp.zeros((batch_size, 0, self.num_kv_heads, self.head_dim), self.param_dtype)
        return KeyValues(empty, empty)

    def _queries_keys_values(self, x: Array) -> tuple[Array, ...]:
        """Return q (B, T, heads, head_dim) and k, v (B, T, kv heads, head_dim)."""
        return tuple(by_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))

    def _sinks(self) -> Array | None:
        """Return the logits of the sinks (heads,), or None."""
        return None if self.sinks is None else self.sinks.logits[...]

    def _packed_state(self, k: Array, v: Array, cu_seqlens: Offsets) -> KeyValues:
        """Return a cache with a row for each packed sequence, whose last tokens are in the last places of the row."""
        concrete = isinstance(cu_seqlens, tuple | np.ndarray)
        places = int(np.diff(np.asarray(cu_seqlens)).max()) if concrete else k.shape[1]
        if self.window is not None:
            places = min(places, self.window - 1)
        offsets = jnp.asarray(cu_seqlens, jnp.int32)
        token = jnp.clip(offsets[1:, None] - places + jnp.arange(places), 0)
        return KeyValues(k[0, token], v[0, token], places - (offsets[1:] - offsets[:-1]))

    def _new_state(self, k: Array, v: Array, start: Array | None) -> KeyValues:
        """Return the cache of keys and values (B, S, kv heads, head_dim), without those that no later token sees.

        Args:
            k, v: the keys and values.
            start: (B,) or (1,), the index of the first token of the last document; None is 0.
        """
        dropped = 0 if self.window is None else max(0, k.shape[1] - self.window + 1)
        if start is None and not dropped:
            return KeyValues(k, v)
        start = jnp.broadcast_to(jnp.zeros(1, jnp.int32) if start is None else start, k.shape[:1])
        return KeyValues(k[:, dropped:], v[:, dropped:], start - dropped)


def check_state(state: object, k: Array) -> None:
    """Raise unless state is a cache to which keys k (B, T, kv heads, head_dim) can be appended."""
    if not isinstance(state, KeyValues):
        raise TypeError(f"state: got {type(state).__name__}, expected KeyValues")
    expected = (k.shape[0], state.k.shape[1], *k.shape[2:])
    for name, x in (("k", state.k), ("v", state.v)):
        if x.shape != expected:
            raise ValueError(f"state.{name}: got shape {x.shape}, expected {expected}")


def _gathered(x: Array | None, axis: str) -> Any:
    """Return the steps of x (B, T, ...) of all devices of a mesh axis one after the other, None for None."""
    return None if x is None else jax.lax.all_gather(x, axis, axis=1, tiled=True)
