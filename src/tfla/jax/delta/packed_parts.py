"""The states of packed sequences of the delta rule that are divided over a mesh axis.

:mod:`tfla.jax.packed_parts` says how devices pass them on.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.delta import chunkwise
from tfla.jax.delta.inputs import DeltaArrays, DeltaInputs, DeltaSpec, Rule, activated
from tfla.jax.delta.spans import Action
from tfla.jax.delta.tile import with_identity
from tfla.jax.inputs import acc_dtype, vary_alike
from tfla.jax.packed_parts import Parts
from tfla.jax.state import State


def initial_states(parts: Parts, rule: Rule, x: DeltaArrays, given: State | None, chunk_size: int) -> State:
    """Return the states (N, ...) before the first step of each sequence on this device.

    Args:
        parts: the parts of the sequences.
        rule: the options of the recurrence.
        x: the arrays of the call.
        given: (N, ...), the states before whole sequences, the same on all devices; None is zero.
        chunk_size: the distance in steps between stored states.
    """
    dtype = acc_dtype(x.q)
    if given is None:
        dims = len(parts.at) - 1, x.v.shape[2], x.q.shape[3], x.v.shape[3]
        given = State.zeros(*dims, normalize=False, dtype=dtype)
    own = jax.checkpoint(_action, static_argnums=(0, 1))(rule, chunk_size, parts.running, x)
    return parts.initial(State(jnp.asarray(given.C).astype(dtype)), own, functools.partial(_passed, rule.correct))


def _passed(correct: bool, action: Action, state: State) -> State:
    """Return the state of one sequence after some of its steps."""
    return State((action.A @ state.C if correct else action.A * state.C) + action.C)


def _action(rule: Rule, chunk_size: int, running: Array, given: DeltaArrays) -> Action:
    """Return how some steps (T,) act on a state: A (H, dqk, dqk), or (H, dqk, 1) without a correction, and C.

    With a correction they are the columns of the final state of a call of its own, which starts from [0 | I] and whose
    values are zero in the columns of I. Steps outside write nothing and do not decay.
    """
    x = activated(rule, given, 1)

    def inside(t: Array) -> Array:
        return jnp.where(running.reshape(1, -1, *[1] * (t.ndim - 2)), t, jnp.zeros((), t.dtype))

    V = x.v.shape[3]
    x = x._replace(
        q=jnp.zeros_like(x.q), k=inside(x.k), v=inside(x.v), beta=inside(x.beta), log_f=inside(x.log_f),
        read_key=None if x.read_key is None else inside(x.read_key),
    )  # fmt: skip
    if rule.correct:
        v = jnp.pad(x.v, [(0, 0)] * 3 + [(0, x.q.shape[3])])
        x = x._replace(v=v, C=with_identity(x.C))
    spec = DeltaSpec(rule, "chunkwise", "segmented", chunk_size, 1, None, None)
    _, last = chunkwise.attend(spec, DeltaInputs(*vary_alike(*x)))
    if rule.correct:
        return Action(last[0, ..., V:], last[0, ..., :V])
    return Action(jnp.exp(x.log_f.sum(1)[0])[..., None], last[0])
