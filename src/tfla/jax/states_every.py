"""The states after every n steps of a call over whole sequences on JAX, for caches of prefixes.

The parts of a dense batch are one `jax.lax.scan` of the operator, so that it is compiled once for all of them. Those of
packed sequences follow from offsets that are known when the call is traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax import checks
from tfla.jax.explicit import as_state_of
from tfla.jax.inputs import acc_dtype, vary_alike
from tfla.jax.state import State
from tfla.jax.state_pool import check_pool, read_rows, write_rows
from tfla.ops.states_every import check_options

Operator = Callable[..., Any]
Found = tuple[Array, State, State]


def with_states_every(
    operator: Operator, check: Callable[[], None], arrays: Mapping[str, Array | None], every: int, *, normalize: bool,
    initial_state: State | None, return_state: bool, cu_seqlens: Any, context_parallel: object, state_indices: Any,
) -> Found:  # fmt: skip
    """Compute h, the final states, and the states after every n steps.

    Args:
        operator: the operator with all options but those below.
        check: the check of its arrays, as in a call without ``every``.
        arrays: its arrays (B, T, ...) by name.
        every: n.
        normalize: whether states have n and m.
        initial_state, return_state, cu_seqlens, context_parallel, state_indices: the operator's own.

    Returns:
        h, the final states, and states with two dims of the batch, (B, T // n, H, ...). Of packed sequences the one
        after step (j + 1) n of sequence s is in [0, cu_seqlens[s] // n + j], and rows of none are zero.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    checks.check_static(states_every=every, return_state=return_state)
    check_options(every, return_state, context_parallel)
    check()
    q, v = arrays["q"], arrays["v"]
    assert q is not None
    assert v is not None
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
        if checks.is_traced(cu_seqlens):
            raise TypeError("cu_seqlens: got a traced array with states_every, expected a tuple or an array of NumPy")
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    dims = v.shape[2], q.shape[3], v.shape[3]
    pool = initial_state
    if state_indices is not None:
        check_pool(pool, state_indices, sequences, "initial_state")
        assert pool is not None
        pool = State(*(None if x is None else jnp.asarray(x) for x in pool))  # type: ignore[arg-type]
        initial_state = read_rows(pool, jnp.asarray(state_indices))
    start = State.zeros(sequences, *dims, normalize=normalize) if initial_state is None else initial_state
    checks.check_state(start, sequences, q, v, normalize, "initial_state")
    start = State(*(None if x is None else jnp.asarray(x).astype(acc_dtype(q)) for x in start))  # type: ignore[arg-type]
    there = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    # Scans need equal types of what they carry.
    start = State(*(None if x is None else as_state_of(there["v"], x) for x in vary_alike(*start, *there.values())[:3]))  # type: ignore[arg-type]
    if cu_seqlens is None:
        h, last, states = _dense(operator, there, every, start)
    else:
        h, last, states = _packed(operator, there, every, start, np.asarray(cu_seqlens))
    return (h, last if pool is None or state_indices is None else write_rows(pool, jnp.asarray(state_indices), last),
            states)  # fmt: skip


def _dense(operator: Operator, arrays: dict[str, Array], every: int, start: State) -> Found:
    """Compute the parts of a dense batch."""
    B, T = arrays["q"].shape[:2]
    count = T // every
    whole = count * every

    def one(state: State, part: dict[str, Array]) -> tuple[State, tuple[Array, State]]:
        """Compute a part from the state before it; return the state after it, to go on with and to keep."""
        h, state = operator(**part, initial_state=state, return_state=True)
        return state, (h, state)

    def parts(x: Array) -> Array:
        """Return the whole parts of (B, T, ...), (parts, B, n, ...)."""
        return jnp.moveaxis(x[:, :whole].reshape(B, count, every, *x.shape[2:]), 1, 0)

    last, (h, states) = jax.lax.scan(one, start, {name: parts(x) for name, x in arrays.items()})
    h = jnp.moveaxis(h, 0, 1).reshape(B, whole, *h.shape[3:])
    if whole < T:
        rest, last = operator(**{name: x[:, whole:] for name, x in arrays.items()}, initial_state=last,
                              return_state=True)  # fmt: skip
        h = jnp.concatenate([h, rest], 1)
    return h, last, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), states)


def _packed(operator: Operator, arrays: dict[str, Array], every: int, state: State, at: np.ndarray) -> Found:
    """Compute packed sequences, of which each part has the next n steps."""
    bounds, T = [*itertools.pairwise(at.tolist())], arrays["q"].shape[1]
    states = jax.tree.map(lambda x: as_state_of(arrays["v"], jnp.zeros((T // every, *x.shape[1:]), x.dtype)), state)
    h, taken = [], np.zeros(0, np.int64)
    for begin in range(0, max((b - a for a, b in bounds), default=0) or 1, every):
        spans = [(min(a + begin, b), min(a + begin + every, b)) for a, b in bounds]
        steps = np.concatenate([np.arange(a, b) for a, b in spans])
        offsets = tuple(int(n) for n in np.cumsum([0, *(b - a for a, b in spans)]))
        part, state = operator(
            **{name: x[:, steps] for name, x in arrays.items()}, initial_state=state, return_state=True,
            cu_seqlens=offsets,
        )  # fmt: skip
        h.append(part)
        taken = np.concatenate([taken, steps])
        ended = np.array([s for s, (a, b) in enumerate(spans) if b - a == every], np.int64)
        rows = np.array([bounds[s][0] // every + begin // every for s in ended], np.int64)
        states = write_rows(states, jnp.asarray(rows), state.gather(ended))
    back = np.argsort(taken)
    return jnp.concatenate(h, 1)[:, back], state, jax.tree.map(lambda x: x[None], states)
