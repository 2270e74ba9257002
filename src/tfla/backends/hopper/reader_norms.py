"""The norms of q or k in `dq_dk_kernel`, which has one reader of the state of the delta rule (NORMS).

What is left of a norm's own gradient is a correction by rows: x (x . dx) / |x|^2 is taken off dx, where x is the
reader, q or k. Consumers leave parts of x . dx for the store warp: reads of earlier tiles (7), before they wait for P,
and pairs of a tile (11), a tile earlier. The dot warp adds them up while the consumers compute steps (5) and (6):

    consumers 0 and 1 --summed (parts of tile n)--> dot warp --factors (of tile n)--> consumers 0 and 1 (9)

To k . dk it adds what keys write, beta dbeta, and to q . dq what a query reads of its own step, q . k times `same`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tfla.backends.hopper import mma, pipeline, scheduler, store_warp


class SharedStorage(NamedTuple):
    """The shared memory in which consumers and the dot warp exchange numbers of one tile at a time."""

    factor: Any  # (x . dx) / |x|^2, (1, L)
    own: Any  # q . k of each step from the consumer that has it, and zeros from the other one, (1, 2 L)
    summed: Any  # barrier: both consumers have stored their parts of x . dx
    factors: Any  # barrier: the dot warp has stored `factor`


@gluon.jit
def allocate(L: gl.constexpr):
    """Return the shared memory."""
    return SharedStorage(
        factor=pipeline.allocate_vectors(gl.float32, 1, L),
        own=pipeline.allocate_vectors(gl.float32, 1, 2 * L),
        summed=pipeline.allocate_barrier(2),
        factors=pipeline.allocate_barrier(1),
    )


@gluon.jit
def store_own_products(products, i, j, norms, half: gl.constexpr, L: gl.constexpr):
    """Store the diagonal of q k^T of a tile, from half of its columns, (L, L / 2), with zeros for the other half."""
    diagonal = gl.expand_dims(i, 1) == gl.expand_dims(half * (L // 2) + j, 0)
    norms.own.index(0).slice(half * L, L, 0).store(gl.sum(gl.where(diagonal, products, 0.0), 1))


@gluon.jit
def signal_sums(norms):
    """Tell the dot warp that this consumer has stored its parts of x . dx."""
    pipeline.barrier()  # all warps of this consumer have stored
    mbarrier.arrive(norms.summed, count=1)


@gluon.jit
def corrections(x_t, n, norms, L: gl.constexpr):
    """Wait for the dot warp, and return what the norm takes off the gradient of tile n, (64, L).

    x_t is the transposed tile of q or k, (64, L), in shared memory.
    """
    layout: gl.constexpr = mma.accumulator_layout(L)
    mbarrier.wait(norms.factors, n & 1)
    factor = norms.factor.index(0).load(gl.SliceLayout(0, layout))
    return x_t.load(layout).to(gl.float32) * gl.expand_dims(factor, 0)


@gluon.jit
def run_dot_warp(source, dbeta, shared, params, config):
    """Store the factor of the correction of each tile.

    Args:
        source: Where beta and the norms come from, a `gate_warp.GateSource`.
        dbeta: (B, T, H) float32, read where keys read.
        shared: The shared memory of the kernel.
        params: The numbers of the scheduler.
        config: The constants of the kernel.
    """
    L: gl.constexpr = config.L
    BY_KEYS: gl.constexpr = shared.same is None
    r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        first = (b.to(gl.int64) * params.T + start) * params.H + h
        beta = source.i_gate + (b.to(gl.int64) * source.stride_ib + h.to(gl.int64) * source.stride_ih)
        beta += gl.to_tensor(start).to(gl.int64) * source.stride_it
        for i in range(0, (steps + L - 1) // L):
            t = i * L + r
            at = t * params.H
            exists = t < steps
            of_reader = gl.load(source.reader_norms + first + at, mask=exists, other=0.0)
            if BY_KEYS:
                written = gl.load(dbeta + first + at, mask=exists, other=0.0)
                written *= gl.load(beta + t.to(gl.int64) * source.stride_it, mask=exists, other=0.0).to(gl.float32)
            s = n % config.STAGES
            mbarrier.wait(shared.norms.summed, n & 1)
            parts = shared.partial_dots.index(s)
            dot = store_warp.add_parts(parts, 0, store_warp.READ_PARTS, r)
            dot += store_warp.add_parts(parts, store_warp.READ_PARTS, store_warp.ROW_PARTS, r)
            if BY_KEYS:
                dot += written
            else:
                own = store_warp.add_parts(shared.norms.own.index(0), 0, 2, r)
                dot += own * shared.same.index(s).load(r.type.layout)
            shared.norms.factor.index(0).store(dot * of_reader * of_reader)
            pipeline.barrier()  # all of the warp has stored
            mbarrier.arrive(shared.norms.factors, count=1)
            n += 1
