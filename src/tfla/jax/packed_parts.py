"""Packed sequences with states that are divided over a mesh axis: each device has parts of some of them.

A device computes its part of each sequence as a packed call of its own, in which sequences without steps on this device
are empty. At most one sequence goes on from the device before. Its state comes from an exchange: each device computes
what its steps of the last sequence that starts on it or before it do to the state, one all-gather hands that to all,
and each device composes what comes before its own steps, (S1) and (S2) of docs/mathematics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import tile
from tfla.jax.gates import clamp, log_gates
from tfla.jax.inputs import acc_dtype, vary_alike
from tfla.jax.spans import Span, gather
from tfla.jax.state import State


class Parts(NamedTuple):
    """The parts of packed sequences on the devices of a mesh axis, of which each has T steps."""

    axis: str
    T: int
    at: Array  # (N + 1,) int32, the offsets in the whole sequence, clamped to values that never fall

    @staticmethod
    def of(T: int, cu_seqlens: Any, axis: str) -> Parts:
        """Return the parts of sequences with these offsets in the whole sequence."""
        at = jnp.clip(jnp.asarray(cu_seqlens).astype(jnp.int32), 0, T * jax.lax.axis_size(axis))
        return Parts(axis, T, jax.lax.cummax(at))

    @staticmethod
    def to_join(return_state: bool, q: Array, cu_seqlens: Any, axis: str | None) -> Parts | None:
        """Return the parts of a checked call whose final states devices have to join, or None."""
        if not return_state or cu_seqlens is None or axis is None:
            return None
        return Parts.of(q.shape[1], cu_seqlens, axis)

    @property
    def here(self) -> Array:
        """The number of this device along the axis."""
        return jax.lax.axis_index(self.axis)

    @property
    def offsets(self) -> Array:
        """The offsets (N + 1,) among the steps of this device, of which many may be equal."""
        return jnp.clip(self.at - self.here * self.T, 0, self.T)

    @property
    def goes_on(self) -> Array:
        """True for each sequence (N,) that starts on a device before this one; it may end there too."""
        return self.at[:-1] < self.here * self.T

    @property
    def earlier_steps(self) -> Array:
        """The steps (N,) of each sequence that are on devices before this one."""
        return jnp.clip(self.here * self.T, self.at[:-1], self.at[1:]) - self.at[:-1]

    def last(self, device: Any) -> tuple[Array, Array]:
        """Return the last sequence that starts on a device or before it, and whether it starts on that device."""
        row = jnp.searchsorted(self.at, (device + 1) * self.T, side="left") - 1
        row = jnp.clip(row, 0, len(self.at) - 2)
        return row, self.at[row] >= device * self.T

    @property
    def running(self) -> Array:
        """The steps of this device (T,) that belong to its last sequence, or come after all sequences."""
        return jnp.arange(self.T) >= self.offsets[self.last(self.here)[0]]

    def initial(self, given: State, own: Any, passed: Callable[[Any, State], State]) -> State:
        """Return the states (N, ...) before the first step of each sequence on this device.

        Args:
            given: (N, ...), the states before whole sequences, the same on all devices.
            own: arrays that say what the steps :attr:`running` of this device do to a state.
            passed: the function that returns the state of one sequence after such steps of a device.
        """
        leaves, tree = jax.tree.flatten((given, own))
        given, own = jax.tree.unflatten(tree, vary_alike(*leaves, self.here)[:-1])
        every = gather(own, self.axis)
        row, begins = jax.vmap(self.last)(jnp.arange(jax.lax.axis_size(self.axis)))
        before = _each(lambda x: x[row], given)

        def add(state: State, at: tuple[Array, Any, State, Array]) -> tuple[State, None]:
            """Pass the state through the steps of one device, if that comes before this one."""
            device, span, start, begins = at
            new = passed(span, _each(lambda a, b: jnp.where(begins, a, b), start, state))
            return _each(lambda a, b: jnp.where(device < self.here, a, b), new, state), None

        devices = jnp.arange(len(row))
        state, _ = jax.lax.scan(add, _each(lambda x: jnp.zeros_like(x[0]), before), (devices, every, before, begins))
        return _each(lambda a, b: jnp.where(self.goes_on.reshape(-1, *[1] * a.ndim), a, b), state, given)

    def final(self, state: State) -> State:
        """Return the states after the last step of each sequence, on all devices.

        Args:
            state: (N, ...), those after the steps of this device.
        """
        return _each(self.of_last_device, state)

    def of_last_device(self, x: Array) -> Array:
        """Return the row of each sequence in x (N, ...) of the device that has its last step, on all devices."""
        owner = jnp.clip((self.at[1:] - 1) // self.T, 0, jax.lax.axis_size(self.axis) - 1) == self.here
        return jax.lax.psum(jnp.where(owner.reshape(-1, *[1] * (x.ndim - 1)), x, 0), self.axis)


def initial_states(
    parts: Parts, k: Array, v: Array, i: Array | None, f: Array, gates: str, normalize: bool, given: State | None
) -> State:
    """Return the states (N, ...) of the mLSTM before the first step of each sequence on this device.

    Args:
        parts: the parts of the sequences.
        k: (1, T, Hq, dqk).
        v: (1, T, H, dhv).
        i, f, gates, normalize: the gates (1, T, H) and what they are, as in :func:`tfla.jax.api.prepare`.
        given: (N, ...), the states before whole sequences, the same on all devices; None is zero.
    """
    dtype = acc_dtype(k)
    if given is None:
        dims = len(parts.at) - 1, v.shape[2], k.shape[3], v.shape[3]
        given = State.zeros(*dims, normalize=normalize, dtype=dtype)
    given = _each(lambda x: jnp.asarray(x).astype(dtype), given)
    if given.m is not None:
        given = given._replace(m=clamp(given.m))
    return parts.initial(
        given, jax.checkpoint(_span, static_argnums=(5, 6))(parts.running, k, v, i, f, gates, normalize), _passed
    )


def _span(running: Array, k: Array, v: Array, i: Array | None, f: Array, gates: str, normalize: bool) -> Span:
    """Return what some steps (T,) do to a state, from a state of zero; the arguments are those of the whole call."""
    if i is None:
        log_f = clamp(f)
        log_i = jnp.zeros_like(log_f)
    else:
        log_i, log_f = log_gates(i, f, gates)
    dtype, group = acc_dtype(k), v.shape[2] // k.shape[2]
    inside = running[None, :, None]
    log_f = jnp.where(inside, log_f.astype(dtype), 0)
    # The sums of log_f after each step.
    after = jax.lax.cumsum(log_f, 1, reverse=True) - log_f
    weight = jnp.where(inside, after + log_i.astype(dtype), -jnp.inf)
    m = None
    if normalize:
        # Of the steps alone: the max state before them may be far below 0. It is finite where no step is inside.
        m = jax.lax.stop_gradient(jnp.maximum(weight.max(1), jnp.finfo(dtype).min / 4))
        weight = weight - m[:, None]
    grows = gates == "log" and not normalize
    w = jnp.moveaxis(jnp.exp(weight / 2 if grows else weight), 1, 2).reshape(1, k.shape[2], group, -1)
    keys, values = (jnp.moveaxis(jnp.where(inside[..., None], x, 0).astype(dtype), 1, 2) for x in (k, v))
    C = tile.outer(keys, values.reshape(*w.shape, v.shape[3]), w, grows)
    n = None
    if normalize:
        n = jnp.einsum("rhjk,rhgj->rhgk", keys, w).reshape(v.shape[2], -1)
    return Span(log_f.sum(1)[0], C.reshape(v.shape[2], *C.shape[3:]), n, None if m is None else m[0])


def _each(fn: Callable[..., Array], *states: State) -> State:
    """Return the state of fn of each array of the states, all of which have the same ones."""
    return State(*(None if xs[0] is None else fn(*xs) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]


def _passed(span: Span, state: State) -> State:
    """Return the state of one sequence after a span of its steps, (S2)."""
    if state.n is None or state.m is None:
        root = jnp.exp(span.g / 2)[:, None, None]  # applied twice, since the decay of a growing state may overflow
        return State(state.C * root * root + span.C)
    m = jax.lax.stop_gradient(jnp.maximum(state.m + span.g, span.m))
    old, new = jnp.exp(state.m + span.g - m), jnp.exp(span.m - m)
    C = old[:, None, None] * state.C + new[:, None, None] * span.C
    return State(C, old[:, None] * state.n + new[:, None] * span.n, m)
