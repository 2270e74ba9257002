"""The kernel "segmented" of the delta rule under JAX.

It divides each sequence of a dense call into segments, which are packed sequences of one batch row for the kernels. The
launch code is that of PyTorch's backend, :mod:`tfla.backends.triton.delta_segments`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tfla.jax.inputs import vary, varying_axes

BY_SEGMENTS = "segmented"  # the kernel that computes the segments of a sequence in parallel


class Cut(NamedTuple):
    """The division of the sequences of a dense call into segments; its numbers are static."""

    batch: int  # B
    T: int
    steps: int  # of a segment, a multiple of a tile's

    @staticmethod
    def of(v: Array, options: Any) -> Cut | None:
        """Return the division for a call, or None if its kernel is not "segmented" or v is empty.

        Args:
            v: the values, (B, T, H, dhv).
            options: the options of the call, :class:`tfla.backends.delta.DeltaSpec`.
        """
        if options.kernel != BY_SEGMENTS or 0 in v.shape[:2]:
            return None
        from tfla.backends.triton.delta_backend import segment_steps

        return Cut(v.shape[0], v.shape[1], segment_steps(options.chunk_size))

    @property
    def segments(self) -> int:
        """The number of segments of a sequence."""
        return -(-self.T // self.steps)

    def offsets(self, like: Array) -> Array:
        """Return the offsets of all segments, int32, varying over the same mesh axes as `like`."""
        # They are computed in the program, since the partitioner accepts no array constants.
        segment = jnp.arange(self.batch * self.segments + 1, dtype=jnp.int32)
        starts = segment // self.segments * self.T + segment % self.segments * self.steps
        return vary(starts, varying_axes(like))

    def as_row(self, x: Any) -> Any:
        """Return (B, T, ...) as (1, B T, ...), and None or an empty array as it is."""
        return x.reshape(1, self.batch * self.T, *x.shape[2:]) if x is not None and x.size else x

    def as_batch(self, x: Any) -> Any:
        """Return (1, B T, ...) as (B, T, ...), and None or an empty array as it is."""
        return x.reshape(self.batch, self.T, *x.shape[2:]) if x is not None and x.size else x

    def states_of_sequences(self, C: Any, index: int) -> Any:
        """Return the states of the segment `index` of each sequence, (B, H, ...), from those of all segments.

        An empty array is returned as it is.
        """
        return C.reshape(self.batch, -1, *C.shape[1:])[:, index] if C.size else C

    def states_of_segments(self, C: Any, index: int) -> Any:
        """Return states of all segments: C (B, H, ...) for the segment `index` of each sequence, and 0 for the others.

        None is returned for None.
        """
        if C is None:
            return None
        every = jnp.zeros((self.batch, self.segments, *C.shape[1:]), C.dtype)
        return every.at[:, index].set(C).reshape(-1, *C.shape[1:])


def launch_forward(backend: str, options: Any, cut: Cut, recorder: Any, x: Any) -> list[Any]:
    """Launch the forward of segments.

    Args:
        backend: the name of the backend.
        options: the options of the call.
        cut: the division of sequences into segments.
        recorder: the recorder of the plan.
        x: the segments as packed sequences; x.C are the states before whole sequences, or None.

    Returns:
        h, the final C of all segments, E, X, and what :class:`.Stored` of PyTorch's launch code has; results that the
        options do not ask for are empty.
    """
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.triton import delta_segments
    from tfla.backends.triton.delta_backend import in_segments

    stored = [recorder.new(*shape) for shape in delta_segments.Stored.shapes(x, options)]
    starts, transitions, *norms = stored
    ctx = delta_segments.context(recorder, x, in_segments(options), norms=norms[0] if norms else None)
    count = delta_segments.count_segments(cut.batch, cut.T, ctx.base.H, cut.steps)
    kernels = DELTA_BACKENDS[backend].segment_kernels()  # type: ignore[attr-defined]
    out = delta_segments.forward(ctx, x.C, count, kernels, starts, transitions)
    return [*out[:4], *(stored if options.save else [recorder.placeholder(0) for _ in stored])]


def launch_backward(backend: str, options: Any, cut: Cut, recorder: Any, x: Any, more: Any) -> Any:
    """Launch the backward of segments and return the gradients; that of C has a state for each segment.

    Args:
        backend, options, cut, recorder, x: as in :func:`launch_forward`.
        more: what the forward returned, from E on; dh; and dC of whole sequences, or None.
    """
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.triton import delta_segments
    from tfla.backends.triton.delta_backend import in_segments

    E, X, starts, transitions, *own, dh, dC = more
    spec, norms = in_segments(options), own[0] if own else None
    contexts = (
        delta_segments.context(recorder, x, spec, norms=norms),
        delta_segments.context(recorder, x, spec, starts, norms=norms),
    )
    count = delta_segments.count_segments(cut.batch, cut.T, contexts[0].base.H, cut.steps)
    kernels = DELTA_BACKENDS[backend].segment_gradients()  # type: ignore[attr-defined]
    return delta_segments.backward(contexts, E, X, transitions, dh, dC, count, kernels)
