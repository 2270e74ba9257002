"""The host side that all Hopper launchers share: TMA descriptors, grids, and where sequences lie in a packed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.gpu.config import ceil_div, processors
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.descriptors import DescriptorCache, EncodedDescriptor
from tfla.backends.hopper.scheduler import VIRTUAL_ROWS
from tfla.backends.hopper.split_reduce import PAIR

# A program of `dq_dk_kernel` has STATE_ROWS rows of a state by up to MAX_STATE_COLUMNS columns.
STATE_ROWS = 128
MAX_STATE_COLUMNS = 256
UNBOUNDED = 0x7FFF0000  # extent of a dimension of a TMA descriptor that no coordinate reaches
CONSUMER_WARPS = 8  # consumer warps of a program, each of which stores a part of <C, dC>
MAX_PROGRAMS_PER_SM = 8  # with packed sequences, so that a multiprocessor that finishes early takes another program


def num_splits(columns: int) -> int:
    """Return how many programs of `dq_dk_kernel` share the columns of a state."""
    return columns // (MAX_STATE_COLUMNS if columns % MAX_STATE_COLUMNS == 0 else STATE_ROWS)


def num_partials(columns: int) -> int:
    """Return how many partial sums of an output these programs leave in memory: one for each pair."""
    return ceil_div(num_splits(columns), PAIR.value)


def programs_per_state(ctx: LaunchContext) -> int:
    """Return how many programs share C or dC: each leaves partial sums for the gate gradients."""
    return ctx.K // STATE_ROWS * num_splits(ctx.V)


def balanced_programs(count: int, most: int) -> int:
    """Return the fewest programs that take `count` work tiles in as few rounds as `most` programs do.

    With more programs only some of them would have a work tile in the last round, and memory bandwidth would be idle.

    Args:
        count: Number of work tiles.
        most: How many programs run at the same time.
    """
    return ceil_div(count, max(1, ceil_div(count, most)))


def num_programs(ctx: LaunchContext, count: int, shared_by: int) -> int:
    """Return how many programs take `count` work tiles, each of which `shared_by` programs share."""
    most = max(1, processors(ctx.x.q.device) // shared_by)
    return max(1, min(count, MAX_PROGRAMS_PER_SM * most) if ctx.packed else balanced_programs(count, most))


def grid(ctx: LaunchContext, shared_by: int) -> tuple[int, int]:
    """Return the grid of a kernel whose work tiles are each shared by `shared_by` programs, which are its axis 0.

    Multiprocessors take programs along axis 0 first, so that long work tiles, which come first, are started first.
    """
    return shared_by, num_programs(ctx, ctx.segments * ctx.H, shared_by)


def descriptor_factory(descriptor: TensorDescriptor) -> Callable[[Tensor], TensorDescriptor | EncodedDescriptor]:
    """Return a function that makes the TMA descriptors of other tensors of the same shape and strides.

    It skips Triton's checks, which are slow, and returns the encoded descriptor where a launch has encoded one for the
    same address.
    """
    remembered: DescriptorCache = {}
    fields = vars(descriptor) | {"base": None, "remembered": remembered}

    def of(base: Tensor) -> TensorDescriptor | EncodedDescriptor:
        encoded = remembered.get(base.data_ptr())
        if encoded is not None:
            return encoded
        made = object.__new__(TensorDescriptor)
        vars(made).update(fields, base=base)
        return made

    return of


def make_descriptor(x: Tensor, L: int, width: int, packed: bool) -> TensorDescriptor:
    """Return the TMA descriptor of `x`, (B, T, H, d), in tiles (L, width).

    TMA clips only at the fixed extents of a descriptor, but a tile of a packed sequence must be clipped at the end of
    its own sequence. Step t of a sequence that ends at step `end` is therefore at row VIRTUAL_ROWS - (end - t) of a
    dimension with VIRTUAL_ROWS rows, which ends exactly at t = end. A second dimension adds `end` rows to the address.
    A third one takes VIRTUAL_ROWS rows off it: addresses wrap around at 2^64 bytes, and so a step of 2^64 /
    VIRTUAL_ROWS bytes less a row, taken VIRTUAL_ROWS times, is VIRTUAL_ROWS rows back.

    Args:
        x: The tensor, (B, T, H, d); packed sequences have B = 1.
        L: Steps of a tile.
        width: Columns of a tile.
        packed: Whether `x` has packed sequences.
    """
    B, T, H, d = x.shape
    b, t, h, _ = x.stride()
    rows: int = VIRTUAL_ROWS.value
    if packed:
        shape, strides = [UNBOUNDED, UNBOUNDED, H, rows, d], [2**64 // rows - t, t, h, t, 1]
    else:
        shape, strides = [B, H, T, d], [b, h, t, 1]
    block = [*[1] * (len(shape) - 2), L, width]
    layout = gl.NVMMASharedLayout(min(128, width * x.element_size()), 8 * x.element_size(), len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


def descriptor(ctx: LaunchContext, x: Tensor, width: int) -> Any:
    """Return the TMA descriptor of `x`, (B, T, H, d), in tiles (L, width)."""
    return ctx.do(descriptor_factory(make_descriptor(x, ctx.L, width, ctx.packed)), x)


def state_descriptor(ctx: LaunchContext, states: Tensor) -> Any:
    """Return the TMA descriptor of `states`, (..., dqk, dhv), in tiles of one state."""
    K, V = states.shape[-2:]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return ctx.do(
        descriptor_factory(TensorDescriptor(states, [states.numel() // V, V], [V, 1], [K, V], layout)), states
    )


def kernel_scalars(ctx: LaunchContext) -> tuple[float, ...]:
    """Return the numbers that all kernels but that of small heads take after their tensors, RUNTIME_SCALARS."""
    return (
        ctx.T, ctx.tiles, ctx.H, ctx.group, ctx.segment_steps, ctx.segments * ctx.H, *ctx.gate_strides, *ctx.scales
    )  # fmt: skip
