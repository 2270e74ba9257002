"""Sums and scans along the steps of a chunk inside of a kernel.

Values have the shape (..., CHUNK // RUN, RUN). Each thread holds runs of RUN consecutive steps, so that most of a scan
needs no exchange between threads.
"""

import triton
import triton.language as tl

RUN = tl.constexpr(4)  # consecutive steps that one thread holds


@triton.jit
def step_indices(CHUNK: tl.constexpr):
    """Return the indices 0 to CHUNK - 1 of the steps of a chunk, (1, CHUNK // RUN, RUN)."""
    return tl.arange(0, CHUNK // RUN)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]


@triton.jit
def store_steps(to, x, held):
    """Store x, (..., CHUNK // RUN, RUN), at the addresses `to`, (..., CHUNK), where `held` is true."""
    tl.store(to, tl.reshape(x, to.shape), mask=held)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def _combine_maxima(before_a, upto_a, before_b, upto_b):
    """Combine the maxima of two adjacent ranges of steps a and b.

    `before` is the maximum over all but the last step of a range, `upto` the maximum over all of its steps.
    """
    return tl.maximum(upto_a, before_b), tl.maximum(upto_a, upto_b)


@triton.jit
def _previous_run(x, first):
    """Return x, (..., runs), shifted by one run: the value of the previous run, and `first` for the first run."""
    AXIS: tl.constexpr = len(x.shape) - 1
    run = tl.zeros(x.shape, tl.int32) + tl.arange(0, x.shape[AXIS])
    return tl.where(run == 0, first, tl.gather(x, tl.maximum(run - 1, 0), AXIS))


@triton.jit
def total_sum(x):
    """Return the sum over all steps of x, (..., runs, RUN), as (...)."""
    AXIS: tl.constexpr = len(x.shape) - 1
    return tl.sum(tl.sum(x, AXIS), AXIS - 1)


@triton.jit
def running_sum(x):
    """Return the inclusive prefix sum over the steps of x, (..., runs, RUN)."""
    AXIS: tl.constexpr = len(x.shape) - 1
    upto = tl.associative_scan(tl.sum(x, AXIS), AXIS - 1, _add)
    return tl.associative_scan(x, AXIS, _add) + tl.expand_dims(_previous_run(upto, 0.0), AXIS)


@triton.jit
def running_max(x, first):
    """Return the exclusive and the inclusive running maximum over steps.

    Args:
        x: values, (heads, runs, RUN) float32.
        first: the maximum before the first step, (heads, 1).
    """
    upto = tl.associative_scan(tl.max(x, 2), 1, _max)
    first = tl.maximum(first, _previous_run(upto, float("-inf")))[:, :, None]
    before, upto = tl.associative_scan((tl.full(x.shape, float("-inf"), tl.float32), x), 2, _combine_maxima)
    return tl.maximum(first, before), tl.maximum(first, upto)
