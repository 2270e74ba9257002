"""Scans of a function over the parts of sequences, and over decoding steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.tiles import Tiling


def over_parts(
    form: Callable[[Any, Any], tuple[Array, Any]], initial: Any, parts: tuple[Array, ...], cut: Tiling
) -> tuple[Array, Any]:
    """Compute the parts of sequences one after another.

    Args:
        form: the function from a state and the arrays of a part (R, H, L, ...) to h and the new state.
        initial: the initial states of all sequences, a tuple of arrays (N, ...) and of None.
        parts: the arrays of all parts.
        cut: the parts of sequences.

    Returns:
        h of all parts, and the states after the last part of each sequence.
    """
    if cut.packing is None:

        def dense(state: Any, at: Any) -> tuple[Any, Array]:
            h, state = form(state, at)
            return state, h

        last, h = jax.lax.scan(dense, initial, parts)
        return h, last
    rows = jnp.minimum(cut.packing.sequence, initial[0].shape[0] - 1)
    empty = cut.packing.empty

    def packed(state: Any, at: Any) -> tuple[Any, tuple[Array, Any]]:
        part, sequence, starts = at
        before = jax.tree.map(lambda given, now: jnp.where(starts, given[sequence][None], now), initial, state)
        h, state = form(before, part)
        return state, (h, state)

    start = jax.tree.map(lambda t: t[:1], initial)
    _, (h, every) = jax.lax.scan(packed, start, (parts, rows, cut.packing.starts))
    last = cut.packing.last

    def after(given: Array, states: Array) -> Array:
        return jnp.where(empty.reshape(-1, *[1] * (given.ndim - 1)), given, states[last, 0])

    return h, jax.tree.map(after, initial, every)


def over_steps(
    step: Callable[[Any, Any], tuple[Array, Any]], start: Any, parts: tuple[Array, ...], lengths: Array | None
) -> tuple[Array, Any]:
    """Compute steps one after another.

    Args:
        step: the function from a state and the arrays of a step to h (B, H, dhv) and the new state.
        start: the state before the first step, a tuple of arrays (B, ...) and of None.
        parts: the arrays of all steps, (T, B, ...).
        lengths: (B,), the steps after which a state is kept; they are clamped to [0, T]. None is T.

    Returns:
        h (B, T, H, dhv), and the state after ``lengths`` steps of each sequence.
    """
    T = parts[0].shape[0]

    def one(memory: tuple[Any, Any], at: Any) -> tuple[tuple[Any, Any], Array]:
        (now, kept), (t, part) = memory, at
        h, now = step(now, part)
        if lengths is None:
            return (now, now), h
        taken = t < jnp.clip(lengths, 0, T)
        kept = jax.tree.map(lambda a, b: jnp.where(taken.reshape(-1, *[1] * (a.ndim - 1)), a, b), now, kept)
        return (now, kept), h

    (_, kept), h = jax.lax.scan(one, (start, start), (jnp.arange(T), parts))
    return jnp.moveaxis(h, 0, 1), kept
