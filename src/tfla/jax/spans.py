"""The exchange of states between devices that hold consecutive parts of a sequence: context parallelism.

A span of steps acts on the state by a number and a matrix per head, C -> exp(g) C + S, with g the sum of log_f over the
span and S what the span alone leaves, (S1) of docs/mathematics.md. Each device computes (g, S) of its span, one
all-gather hands them to all, and each device composes those before it, (S2), to the state at its start. The backward
does the same with cotangents, from the last device to the first. What is exchanged does not depend on the length of
the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.inputs import Inputs, Spec, vary, varying_axes
from tfla.jax.tile import Carry


class Span(NamedTuple):
    """The effect of a span of steps on a state: its log-decay and the state that it leaves from none."""

    g: Array  # (B, H), the sum of log_f
    C: Array  # (B, H, dqk, dhv)
    n: Any  # (B, H, dqk); None: no normalizer
    m: Any  # (B, H); None: no normalizer


class PackedSteps:
    """The steps of one device, of packed sequences that are divided over a mesh axis.

    Where the gate of the first step of each packed sequence is closed, one sequence has the results of the packed ones
    without initial states, whichever device that step is on.

    Args:
        T: the number of steps of each device.
        cu_seqlens: the offsets in the whole sequence, the same on all devices.
        axis: the mesh axis.
    """

    def __init__(self, T: int, cu_seqlens: Any, axis: str) -> None:
        step, offsets = jax.lax.axis_index(axis) * T + jnp.arange(T), jnp.asarray(cu_seqlens)
        self.starts = jnp.isin(step, offsets)
        self.inside = step < offsets[-1]

    def close(self, gates: Array) -> Array:
        """Return gates (B, T, ...) that are closed at the first step of each sequence."""
        return self._replace(self.starts, gates, -jnp.inf)

    def values(self, v: Array) -> Array:
        """Return values (B, T, ...) that are zero after the last sequence, so that outputs there are zero."""
        return self._replace(~self.inside, v, 0)

    def read_keys(self, keys: Array) -> Array:
        """Return keys (B, T, ...) that read nothing of the state before each sequence."""
        return self._replace(self.starts, keys, 0)

    @staticmethod
    def _replace(where: Array, x: Array, by: float) -> Array:
        """Return x (B, T, ...) with another number at some steps."""
        return jnp.where(where.reshape(-1, *[1] * (x.ndim - 2)), jnp.asarray(by, x.dtype), x)


def gather(x: Any, axis: str) -> Any:
    """Return the arrays of x from all devices of a mesh axis along a new first dim, empty ones without a collective."""
    size = jax.lax.axis_size(axis)

    def one(t: Array) -> Array:
        return jax.lax.all_gather(t, axis) if t.size else vary(jnp.zeros((size, *t.shape), t.dtype), varying_axes(t))

    return jax.tree.map(one, x)


def of_last_device(x: Any, axis: str) -> Any:
    """Return the arrays of x of the last device of a mesh axis, on all devices."""
    last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
    return jax.tree.map(lambda t: jax.lax.psum(jnp.where(last, t, 0), axis), x)


def initial_state(spec: Spec, x: Inputs, span: Span) -> tuple[Array, Array | None, Array | None]:
    """Return the state C, n, m before the span of this device: the initial state, then all spans before this one.

    The span of the first device contains the initial state.

    Args:
        spec: the options.
        x: the inputs, whose C, n and m are the initial state.
        span: what the span of this device does to the state.
    """
    assert spec.axis is not None
    me = jax.lax.axis_index(spec.axis)
    every = gather(span, spec.axis)

    def add(state: Any, at: tuple[Array, Span]) -> tuple[Any, None]:
        """Pass the state through the span of one device, if that comes before this one."""
        rank, s = at
        C, n, m = state
        if spec.normalize:
            m_new = jnp.maximum(m + s.g, s.m)
            old, new = jnp.exp(m + s.g - m_new), jnp.exp(s.m - m_new)
            added: Any = (
                old[..., None, None] * C + new[..., None, None] * s.C, old[..., None] * n + new[..., None] * s.n, m_new
            )  # fmt: skip
        else:
            root = jnp.exp(s.g / 2)[..., None, None]  # applied twice, since the decay of a growing state may overflow
            added = C * root * root + s.C, None, None
        first = jax.tree.map(lambda t: t[0], (every.C, every.n, every.m))
        taken = jax.tree.map(lambda a, b: jnp.where(rank == 0, a, b), first, added)
        return jax.tree.map(lambda a, b: jnp.where(rank < me, a, b), taken, state), None

    start = x.C, x.n, x.m
    ranks = jnp.arange(jax.lax.axis_size(spec.axis))
    (C, n, m), _ = jax.lax.scan(add, start, (ranks, every))
    return C, n, m


def final_cotangent(spec: Spec, log_decay: Array, cotangent: Carry, last: Carry) -> Carry:
    """Return the cotangent of the state after the span of this device.

    Args:
        spec: the options.
        log_decay: (r, h, g), the log-decay of the stabilized state over the span.
        cotangent: that of the state before the span, from the outputs of the span alone, and on the last device from
            the final state too.
        last: the cotangent of the final state on the last device, zero on the others.
    """
    assert spec.axis is not None
    me = jax.lax.axis_index(spec.axis)
    every = gather((log_decay, cotangent), spec.axis)

    def add(after: Carry, at: tuple[Array, tuple[Array, Carry]]) -> tuple[Carry, None]:
        """Pass the cotangent back through the span of one device, if that comes after this one."""
        rank, (g, span) = at
        root = jnp.exp(g / 2)

        def one(after: Array, span: Array) -> Array:
            weight = root.reshape(*root.shape, *[1] * (after.ndim - root.ndim))
            added = jnp.where(rank == jax.lax.axis_size(spec.axis) - 1, span, after * weight * weight + span)
            return jnp.where(rank > me, added, after)

        return jax.tree.map(one, after, span), None

    ranks = jnp.arange(jax.lax.axis_size(spec.axis))
    found, _ = jax.lax.scan(add, last, (ranks, every), reverse=True)
    return found
