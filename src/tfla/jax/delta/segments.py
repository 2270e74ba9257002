"""The kernel "segmented" of the delta rule under JAX, whose segments are packed sequences of one batch row.

The launch code is that of :mod:`tfla.backends.triton.delta_segments`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tfla.jax.inputs import vary, varying_axes

BY_SEGMENTS = "segmented"  # the kernel that computes the segments of a sequence side by side


class Cut(NamedTuple):
    """How the sequences of a dense call are cut into segments; all of it is static."""

    batch: int  # B
    T: int
    steps: int  # of a segment, whole tiles

    @staticmethod
    def of(v: Array, options: Any) -> Cut | None:
        """Return how a call is cut, or None where the kernel is another one or there are no steps.

        Args:
            v: the values, (B, T, H, dhv).
            options: those of the call, :class:`tfla.backends.delta.DeltaSpec`.
        """
        if options.kernel != BY_SEGMENTS or 0 in v.shape[:2]:
            return None
        from tfla.backends.triton.delta_backend import segment_steps

        return Cut(v.shape[0], v.shape[1], segment_steps(options.chunk_size))

    @property
    def number(self) -> int:
        """The number of segments of a sequence."""
        return -(-self.T // self.steps)

    def offsets(self, like: Array) -> Array:
        """Return the offsets of all segments, int32, which vary over the mesh axes over which `like` does."""
        segment = jnp.arange(self.batch * self.number + 1, dtype=jnp.int32)  # no constant: the partitioner takes none
        starts = segment // self.number * self.T + segment % self.number * self.steps
        return vary(starts, varying_axes(like))

    def as_row(self, x: Any) -> Any:
        """Return (B, T, ...) as (1, B T, ...), and None or an empty array as it is."""
        return x.reshape(1, self.batch * self.T, *x.shape[2:]) if x is not None and x.size else x

    def back(self, x: Any) -> Any:
        """Return (1, B T, ...) as (B, T, ...), and None or an empty array as it is."""
        return x.reshape(self.batch, self.T, *x.shape[2:]) if x is not None and x.size else x

    def of_sequences(self, C: Any, place: int) -> Any:
        """Return the states (B, H, ...) of one segment of each sequence, or an empty array as it is."""
        return C.reshape(self.batch, -1, *C.shape[1:])[:, place] if C.size else C

    def among_segments(self, C: Any, place: int) -> Any:
        """Return states of all segments that are C (B, H, ...) at one place of each sequence and else 0, or None."""
        if C is None:
            return None
        every = jnp.zeros((self.batch, self.number, *C.shape[1:]), C.dtype)
        return every.at[:, place].set(C).reshape(-1, *C.shape[1:])


def launch_forward(backend: str, options: Any, cut: Cut, recorder: Any, x: Any) -> list[Any]:
    """Launch the forward of segments.

    Args:
        backend: the name of the backend.
        options: those of the call.
        cut: how sequences are cut.
        recorder: the recorder of the plan.
        x: the segments as packed sequences; x.C are the states before whole sequences, or None.

    Returns:
        h, the final C of all segments, E, X, and the states at the starts of segments and their transitions; those
        that the options do not ask for are empty.
    """
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.triton import delta_segments
    from tfla.backends.triton.delta_backend import in_segments

    ctx = delta_segments.context(recorder, x, in_segments(options))
    base = ctx.base
    count = delta_segments.count_segments(cut.batch, cut.T, base.H, cut.steps)
    stored = [base.new(x.sequences, base.H, base.K, size) for size in (base.V, base.K)]
    kernels = DELTA_BACKENDS[backend].segment_kernels()  # type: ignore[attr-defined]
    out = delta_segments.forward(ctx, x.C, count, kernels, *stored)
    return [*out[:4], *(stored if options.save else [base.placeholder(0) for _ in stored])]


def launch_backward(backend: str, options: Any, cut: Cut, recorder: Any, x: Any, more: Any) -> Any:
    """Launch the backward of segments and return the gradients, that of C for all segments.

    Args:
        backend, options, cut, recorder, x: as in :func:`launch_forward`.
        more: E, X and what the forward stored of segments, dh, and dC of whole sequences or None.
    """
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.triton import delta_segments
    from tfla.backends.triton.delta_backend import in_segments

    E, X, starts, transitions, dh, dC = more
    own, from_starts = (delta_segments.context(recorder, x, in_segments(options), C) for C in (None, starts))
    count = delta_segments.count_segments(cut.batch, cut.T, own.base.H, cut.steps)
    kernels = DELTA_BACKENDS[backend].segment_gradients()  # type: ignore[attr-defined]
    return delta_segments.backward((own, from_starts), E, X, transitions, dh, dC, count, kernels)
