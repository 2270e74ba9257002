"""Scans along the steps of a chunk, (..., runs, RUN): a thread has RUN steps in a row, so most of a scan is its own."""

import triton
import triton.language as tl

RUN = tl.constexpr(4)


@triton.jit
def step_indices(CHUNK: tl.constexpr):
    """(1, CHUNK // RUN, RUN)."""
    return tl.arange(0, CHUNK // RUN)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]


@triton.jit
def store_steps(to, x, held):
    """Stores x at `to`, which has no axis for runs."""
    tl.store(to, tl.reshape(x, to.shape), mask=held)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def _combine_maxima(before_a, upto_a, before_b, upto_b):
    """Joins the maxima of two stretches: over all but the last step of each, and over all."""
    return tl.maximum(upto_a, before_b), tl.maximum(upto_a, upto_b)


@triton.jit
def _previous_run(x, first):
    """What x (..., runs) is one run earlier."""
    AXIS: tl.constexpr = len(x.shape) - 1
    run = tl.zeros(x.shape, tl.int32) + tl.arange(0, x.shape[AXIS])
    return tl.where(run == 0, first, tl.gather(x, tl.maximum(run - 1, 0), AXIS))


@triton.jit
def total_sum(x):
    """The sum over all steps."""
    AXIS: tl.constexpr = len(x.shape) - 1
    return tl.sum(tl.sum(x, AXIS), AXIS - 1)


@triton.jit
def running_sum(x):
    """The sum up to each step."""
    AXIS: tl.constexpr = len(x.shape) - 1
    upto = tl.associative_scan(tl.sum(x, AXIS), AXIS - 1, _add)
    return tl.associative_scan(x, AXIS, _add) + tl.expand_dims(_previous_run(upto, 0.0), AXIS)


@triton.jit
def running_max(x, first):
    """Of x (heads, runs, RUN) and `first` (heads, 1): the maximum before each step, and with it."""
    upto = tl.associative_scan(tl.max(x, 2), 1, _max)
    first = tl.maximum(first, _previous_run(upto, float("-inf")))[:, :, None]
    before, upto = tl.associative_scan((tl.full(x.shape, float("-inf"), tl.float32), x), 2, _combine_maxima)
    return tl.maximum(first, before), tl.maximum(first, upto)
