"""Shared memory, mbarriers, TMA copies and MMAs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gluon_simulator.clocks import (
    COPIES,
    MMAS,
    READERS,
    Ints,
    RaceError,
    VectorClock,
    agent_of,
    check_read,
    check_write,
    new_places,
)
from gluon_simulator.program import current
from gluon_simulator.values import Block, Pointer, flat, plain

BLOCK = 8  # rows and columns of a place: accesses of the same place of a matrix in shared memory conflict


class Where:
    """The line of a kernel that is running, for messages."""

    def __init__(self) -> None:
        frame = sys._getframe(2)
        while frame.f_globals["__name__"] in (__name__, f"{__package__}.language") and frame.f_back is not None:
            frame = frame.f_back
        self.code, self.line = frame.f_code, frame.f_lineno

    def __str__(self) -> str:
        return f"{self.code.co_filename.rsplit('/', 1)[-1]}:{self.line}, {self.code.co_name},"


class Shared:
    """A view of shared memory, which holds NaN at first, or the smallest integer."""

    type = Block.type

    def __init__(self, data: Tensor, places: Ints, block: int) -> None:
        self.data, self.places, self.block = data, places, block

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Sequence[int], block: int) -> Shared:
        nothing = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        data = torch.full(list(shape), nothing, dtype=dtype)
        tail = 2 if block > 1 else 0
        return cls(data, new_places([n // block if i >= len(shape) - tail else n for i, n in enumerate(shape)]), block)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)], self.places[int(i)], self.block)

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        start, block = int(start), self.block if self.data.ndim - dim <= 2 else 1
        places = self.places.swapaxes(0, dim)[start // block : -(-(start + length) // block)].swapaxes(0, dim)
        return Shared(self.data.narrow(dim, start, length), places, self.block)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.places.transpose(*order, len(order)), self.block)

    def reshape(self, shape: Sequence[int]) -> Shared:
        if self.block == 1:  # a place is an element
            places = self.places.reshape([*shape, self.places.shape[-1]])
        elif self.data.ndim == 2 and len(shape) == 3:
            assert shape[2] == self.data.shape[1] and shape[1] % self.block == 0, "rows are divided at places"  # noqa: PT018
            places = self.places.reshape([shape[0], shape[1] // self.block, *self.places.shape[1:]])
        else:
            kept = [n for n in self.data.shape if n > 1]
            assert kept == [n for n in shape if n > 1], "sides of one element come and go"
            sides = iter(self.places.shape[i] for i, n in enumerate(self.data.shape) if n > 1)
            places = self.places.reshape([*(next(sides) if n > 1 else 1 for n in shape), self.places.shape[-1]])
        return Shared(self.data.view(*shape), places, self.block)

    def load(self, layout: Any = None) -> Block:
        self.read(*current().partition.access())
        return Block(self.data.clone())

    def store(self, value: Block) -> None:
        partition = current().partition
        assert value.shape == self.shape, f"{value.shape} is stored to {self.shape}"
        assert value.dtype == self.dtype, f"{value.dtype} is stored to {self.dtype}"
        # A warp has waited for its own part of an MMA; the parts of other warps may still read their operands.
        clock, mmas = partition.clock.copy(), agent_of(partition.index, MMAS)
        clock.times[mmas] = partition.shared.times[mmas]
        check_write(self.places, *partition.access(), clock, Where())
        self.data.copy_(value.data)

    def read(self, agent: int, time: int) -> None:
        check_read(self.places, agent, time, current().partition.clock, Where())


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals have come and all announced bytes have been copied."""

    def __init__(self) -> None:
        program = current()
        self.agent = READERS + len(program.barriers)
        program.barriers.append(self)
        self.copies = 0
        self.invalidated = False

    def init(self, count: int) -> None:
        self._use()
        self.count = self.missing = count
        self.phase = self.bytes = 0
        self.next, self.clock = VectorClock(), VectorClock()
        self.fenced = False  # whether TMA may use it: a fence has come after its initialization
        self.passed: dict[int, int] = {}  # the times at which agents went on after waiting for this phase

    def _use(self) -> None:
        if self.invalidated:
            raise RaceError("a barrier is used after its invalidation")
        self.last_use = current().tick()

    def invalidate(self) -> None:
        self._use()
        self.invalidated = True

    def check_lifetime(self) -> None:
        """Raise RaceError if memory that was allocated after the last use may be the barrier's.

        The compiler gives the memory of what is not used any more to later tensors. PTX allows that only after an
        invalidation: where processes share a GPU, what is stored there may be lost.
        """
        if not self.invalidated and self.last_use < current().last_allocation:
            raise RaceError("a barrier is not invalidated, and shared memory is allocated after its last use")

    @property
    def empty(self) -> bool:
        return self.bytes == 0

    def _done(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            for agent, time in self.passed.items():
                if self.next.times[agent] < time:  # a warp of it that has not gone on yet would miss this phase
                    raise RaceError(
                        f"a barrier's phase ends before all warps of agent {agent} have seen the last one end"
                    )
            self.passed = {}
            self.clock, self.next = self.next, self.next.copy()
            self.missing, self.phase = self.count, self.phase ^ 1
        assert self.missing >= 0, f"a phase of a barrier has more than {self.count} arrivals"

    def arrive(self, count: int = 1) -> None:
        self._use()
        self.next.learn(current().partition.shared)
        self.missing -= count
        self._done()

    def expect(self, count: int) -> None:
        self.bytes += count
        self.arrive()

    def brought(self, count: int, clock: VectorClock) -> None:
        self.next.learn(clock)
        self.bytes -= count
        self._done()

    def wait(self, phase: int) -> None:
        program = current()
        program.wait(f"a barrier, {Where()}", lambda: self.phase != phase)
        self._use()
        program.partition.clock.learn(self.clock)
        program.partition.shared.learn(self.clock)  # every thread of the partition waits
        if program.partition.warps > 1:
            agent, time = program.partition.access()
            self.passed[agent] = time


class Descriptor:
    """A TMA descriptor: tiles of a tensor that copies move."""

    def __init__(self, given: Any) -> None:
        self.memory, self.base = flat(given.base), given.base.storage_offset()
        self.sides, self.strides, self.tile = list(given.shape), list(given.strides), list(given.block_shape)
        self.dtype, self.layout, self.block_type = given.base.dtype, given.layout, self
        self.shape, self.nbytes = self.tile, torch.Size(self.tile).numel() * given.base.element_size()

    def inside(self, coordinates: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]] | None:
        """Return the part of a tile that is in bounds, as a view of memory, and its slices of the tile, or None.

        Addresses wrap around at 64 bits, as those of TMA do.
        """
        first = [int(plain(x)) for x in coordinates]
        assert all(-(2**31) <= x < 2**31 for x in first), f"coordinates {first} have 32 bits"
        begin = [max(x, 0) for x in first]
        end = [min(x + n, side) for x, n, side in zip(first, self.tile, self.sides, strict=True)]
        sizes = [b - a for a, b in zip(begin, end, strict=True)]
        if min(sizes) <= 0:
            return None
        wrap = 2**64 // self.memory.element_size()
        at = (self.base + sum(x * s for x, s in zip(begin, self.strides, strict=True))) % wrap
        last = at + sum((n - 1) * s for n, s in zip(sizes, self.strides, strict=True))
        if last >= self.memory.numel():
            raise IndexError(f"element {last} of a tensor that has {self.memory.numel()}")
        strides = [s if n > 1 else 1 for n, s in zip(sizes, self.strides, strict=True)]
        where = tuple(slice(a - x, b - x) for x, a, b in zip(first, begin, end, strict=True))
        return self.memory.as_strided(sizes, strides, at), where


def async_load(tensor: Descriptor, coordinates: Sequence[Any], bar: Barrier, to: Shared) -> None:
    partition = current().partition
    if not bar.fenced:
        raise RaceError(f"{Where()} names a barrier that was made without a fence")
    bar.copies += 1
    check_write(to.places, bar.agent, bar.copies, partition.clock, Where())
    clock = partition.clock.copy()
    clock.times[bar.agent] = bar.copies
    to.data.zero_()
    found = tensor.inside(coordinates)
    if found is not None:
        to.data.view(*tensor.tile)[found[1]] = found[0]
    bar.brought(tensor.nbytes, clock)


def async_store(tensor: Descriptor, coordinates: Sequence[Any], x: Shared) -> None:
    x.read(*current().partition.start_copy())
    found = tensor.inside(coordinates)
    if found is not None:
        found[0].copy_(x.data.reshape(tensor.tile)[found[1]])


def async_add(tensor: Descriptor, coordinates: Sequence[Any], x: Shared) -> None:
    """Add a tile to memory; the sums are rounded to the dtype of the tensor."""
    x.read(*current().partition.start_copy())
    found = tensor.inside(coordinates)
    if found is not None:
        found[0].add_(x.data.reshape(tensor.tile)[found[1]])


def prefetch(pointer: Pointer, size: int) -> None:
    """Check what a prefetch to L2 names: whole elements of a tensor, in units of 16 bytes."""
    itemsize = pointer.storage.element_size()
    assert size > 0, f"a prefetch of {size} bytes"
    assert size % 16 == plain(pointer.offset) * itemsize % 16 == 0, "a prefetch of parts of 16 bytes"
    for element in (0, size // itemsize - 1):
        (pointer + element).elements(None)


def store_wait(pendings: int) -> None:
    """Wait until all but `pendings` copies to memory are done."""
    partition = current().partition
    partition.wait_for(COPIES, partition.copies - pendings)


def operand(x: Any, precision: str | None = "tf32") -> Tensor:
    """Return the numbers that an MMA multiplies, in float32: in tf32 these lose the bits it does not have."""
    data: Tensor = x.data
    cut = precision == "tf32" and data.dtype == torch.float32
    return (data.view(torch.int32) & -0x2000).view(torch.float32) if cut else data.float()


def mma_v2(a: Block, b: Block, acc: Block, input_precision: str | None = None) -> Block:
    """Return a b + acc of operands in registers."""
    return Block(operand(a, input_precision) @ operand(b, input_precision) + acc.data)


def warpgroup_mma(a: Any, b: Shared, acc: Block, *, use_acc: bool = True, is_async: bool = False) -> Block:
    """Return a b + acc in float32; with `is_async` the result may be used after a wait for it."""
    agent, time = current().partition.start_mma()
    for x in (a, b):
        if isinstance(x, Shared):
            x.read(agent, time)
    product = operand(a) @ operand(b)
    made = Block(product + acc.accumulator if use_acc else product, time)
    return made if is_async else warpgroup_mma_wait(0, [made])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Block] = ()) -> Any:
    """Wait for all but `num_outstanding` MMAs, and return `deps`, whose finished results may then be used."""
    partition = current().partition
    done = partition.mmas - num_outstanding
    partition.wait_for(MMAS, done)
    passed = [x if x.pending is None or x.pending > done else Block(x.accumulator) for x in deps]
    return passed[0] if len(passed) == 1 else tuple(passed)
