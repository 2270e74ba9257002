"""The recurrent state of the operators on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import Array

from tfla._util.shapes import check_shape
from tfla.jax.explicit import axes_of, divided
from tfla.jax.rows import checked_rows


class State(NamedTuple):
    """The stabilized state of gated linear attention; the true state is ``exp(m) C`` and ``exp(m) n``.

    It has the fields, shapes and meaning of :class:`tfla.State`, and is a pytree. With ``cu_seqlens``, B is the number
    of sequences. The value of m is a choice of the computation and cancels out of every result. Gradients reach the
    true state through C and n; a returned m carries none.

    Attributes:
        C: (B, H, dqk, dhv).
        n: (B, H, dqk), the normalizer; None without one.
        m: (B, H), the max state; None without a normalizer.
    """

    C: Array
    n: Array | None = None
    m: Array | None = None

    @staticmethod
    def zeros(batch: int, heads: int, dqk: int, dhv: int, *, normalize: bool = True, dtype: Any = jnp.float32) -> State:
        """Return the state before the first step, which is zero.

        Args:
            batch: the number of sequences.
            heads: the number of heads of v.
            dqk, dhv: the sizes of a head of q and k, and of v.
            normalize: whether the state has a normalizer n and a max state m.
            dtype: a float dtype, that of C and n. m is at least float32, since its error scales the whole state.

        Raises:
            TypeError, ValueError: a size is no int or below 1 (batch: below 0), or dtype is no float dtype.
        """
        for name, size in {"batch": batch, "heads": heads, "dqk": dqk, "dhv": dhv}.items():
            if isinstance(size, bool) or not (isinstance(size, int) or jax.export.is_symbolic_dim(size)):
                raise TypeError(f"{name}: got {size!r}, expected an int")
            if size < 0 or (name != "batch" and size == 0):
                raise ValueError(f"{name}: got {size}, expected at least {int(name != 'batch')}")
        try:
            is_float = jnp.issubdtype(dtype, jnp.floating)
        except TypeError:
            is_float = False
        if not is_float:
            raise TypeError(f"dtype: got {dtype!r}, expected a float dtype")
        C = jnp.zeros((batch, heads, dqk, dhv), dtype)
        if not normalize:
            return State(C)
        wide = jnp.float64 if C.dtype == jnp.float64 else jnp.float32
        return State(C, jnp.zeros((batch, heads, dqk), dtype), jnp.zeros((batch, heads), wide))

    def stop_gradient(self) -> State:
        """Return the same state, through which no gradient passes."""
        return self._each(jax.lax.stop_gradient)

    def gather(self, rows: Any) -> State:
        """Return the states of some sequences of the batch.

        Over mesh axes of explicit sharding, the batch of the result is divided as ``rows`` are.

        Args:
            rows: (R,) integers, the indices of the sequences, in any order; an index may occur more than once.

        Raises:
            TypeError, ValueError: rows are no one-dimensional list or array of integers, or out of range. A boolean
                mask is not accepted. Values that are traced or on other devices than CPUs are not checked. Of those
                negative ones then count from the end, and others out of range are the first or the last sequence.
        """
        index = checked_rows(rows, self.C.shape[0])
        return self._each(lambda x: divided(lambda x, at: x[at], axes_of(index) + axes_of(x)[1:], x, index))

    def scatter(self, rows: Any, states: State) -> State:
        """Return a state in which some sequences have been replaced.

        Args:
            rows: (R,) integers, the indices of the sequences, each at most once.
            states: the new states, with batch R; sequence rows[j] gets the j-th one.

        Raises:
            TypeError, ValueError: as :meth:`gather`; or rows contain an index twice; or ``states`` is no State, or has
                other shapes apart from the batch R, or n and m where this state has none, or the reverse. Of rows
                that are not checked, those out of range are left out, and one of the states of an index that occurs
                twice is taken.
        """
        if not isinstance(states, State):
            raise TypeError(f"states: got {type(states).__name__}, expected tfla.jax.State")
        index = checked_rows(rows, self.C.shape[0], once=True)
        for name, own, given in zip(self._fields, self, states, strict=True):
            if (own is None) != (given is None):
                got, wanted = ("None", "an array") if given is None else ("an array", "None")
                raise ValueError(f"states.{name}: got {got}, expected {wanted}")
            if own is not None:
                check_shape(f"states.{name}", given, (index.shape[0], *own.shape[1:]))
        pairs = zip(self, states, strict=True)
        new = (None if a is None or b is None else _written(jnp.asarray(a), index, jnp.asarray(b)) for a, b in pairs)
        return State(*new)  # type: ignore[arg-type]

    def reset(self, rows: Any) -> State:
        """Return a state in which some sequences are before their first step.

        Args:
            rows: (R,) integers, the indices of the sequences.

        Raises:
            TypeError, ValueError: as :meth:`gather`. Of rows that are not checked, those out of range are left out.
        """
        index = checked_rows(rows, self.C.shape[0])
        return self._each(lambda x: _written(x, index, jnp.zeros((), x.dtype)))

    def _each(self, fn: Callable[[Array], Array]) -> State:
        """Return the state of fn of each array."""
        return State(*(None if x is None else fn(jnp.asarray(x)) for x in self))  # type: ignore[arg-type]


# So that exported functions with states can be serialized.
jax.export.register_namedtuple_serialization(State, serialized_name="tfla.jax.State")


def _written(x: Array, index: Array, new: Array) -> Array:
    """Return x, divided over devices as it is, with new values at some indices of its first dim."""
    return divided(lambda x, at, new: x.at[at].set(new), axes_of(x), x, index, new.astype(x.dtype))
