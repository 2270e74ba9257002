"""The exchange of states between devices that hold consecutive parts of a sequence, for the delta rule.

A span of steps acts on the state of a head by a transition A and by the state S that it leaves from none:

    C_out = A C_in + S        dC_in = A^T dC_out + S'

S' is the cotangent of the state before the span from its outputs alone. A is a matrix (dqk x dqk); without a correction
it is diagonal, (dqk x 1). As in :mod:`tfla.jax.spans`, one all-gather hands the actions of all devices to all, and each
composes those before it, or in the backward those after it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.delta.inputs import DeltaSpec


class Action(NamedTuple):
    """The action of a span on a state or on its cotangent."""

    A: Array  # (B, Hq, group, dqk, dqk or 1)
    C: Array  # (B, Hq, group, dqk, dhv): S


def apply(spec: DeltaSpec, A: Array, C: Array) -> Array:
    """Return A C."""
    return A @ C if spec.rule.correct else A * C


def initial_state(spec: DeltaSpec, given: Array, own: Action) -> Array:
    """Return the state before the span of this device; that of the first device contains the given initial state."""
    assert spec.axis is not None
    me = jax.lax.axis_index(spec.axis)

    def add(C: Array, at: tuple[Array, Action]) -> tuple[Array, None]:
        rank, span = at
        after = jnp.where(rank == 0, span.C, apply(spec, span.A, C) + span.C)
        return jnp.where(rank < me, after, C), None

    ranks = jnp.arange(jax.lax.axis_size(spec.axis))
    return jax.lax.scan(add, given, (ranks, jax.lax.all_gather(own, spec.axis)))[0]


def final_cotangent(spec: DeltaSpec, last: Array, own: Action) -> Array:
    """Return the cotangent of the state after the span of this device.

    Args:
        spec: the options.
        last: the cotangent of the final state on the last device, zero on the others.
        own: the transition of this device's span and the cotangent of the state before it, from the outputs of the span
            alone, and on the last device from the final state too.
    """
    assert spec.axis is not None
    me, size = jax.lax.axis_index(spec.axis), jax.lax.axis_size(spec.axis)

    def add(dC: Array, at: tuple[Array, Action]) -> tuple[Array, None]:
        rank, span = at
        back = span.A.mT if spec.rule.correct else span.A
        before = jnp.where(rank == size - 1, span.C, apply(spec, back, dC) + span.C)
        return jnp.where(rank > me, before, dC), None

    every = jnp.arange(size), jax.lax.all_gather(own, spec.axis)
    return jax.lax.scan(add, last, every, reverse=True)[0]
