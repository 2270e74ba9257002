"""Plans: the allocations and launches of one call, recorded without running them, for other hosts than PyTorch.

What a call allocates and launches depends only on shapes, dtypes and options. A :class:`PlanRecorder` takes the place
of the :class:`~tfla.backends.gpu.replay.LaunchRecorder` while the launch code runs on tensors of the meta device; its
steps are data, which another host, such as a function compiled by JAX, turns into its own operations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tfla.backends.gpu import side_by_side
from tfla.backends.gpu.replay import LaunchRecorder, fill_with_ones, some_tiles
from tfla.backends.gpu.runtime import INTERPRETED, PlannedGPU, planned_for


class Allocate(NamedTuple):
    """The allocation of a tensor, not filled."""

    result: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Fill(NamedTuple):
    """The filling of a whole tensor with one value."""

    target: int
    value: float = 0.0


class Copy(NamedTuple):
    """The copy of one whole tensor to another of the same shape, with a conversion to its dtype."""

    target: int
    source: int


class Resize(NamedTuple):
    """The copy of a tensor to one of another shape, each dim of which is cut or padded with zeros at its end."""

    result: int
    source: int
    shape: tuple[int, ...]


class Rows(NamedTuple):
    """The rows [start, stop) of a tensor, in its memory: what a launch writes to them it writes to the tensor."""

    result: int
    source: int
    start: int
    stop: int


class Tiles(NamedTuple):
    """The copy of the tiles [start, stop) of each of `rows` batch rows of a tensor (H, rows * tiles, ...)."""

    result: int
    source: int
    rows: int
    start: int
    stop: int


class AddTiles(NamedTuple):
    """The addition of source[row], (H, rows * tiles, ...), summed over the tiles of each row, to target[start:stop]."""

    target: int
    start: int
    stop: int
    source: int
    row: int


class SumOf(NamedTuple):
    """The sum of source[row] over its first dim."""

    result: int
    source: int
    row: int


class ScaledColumns(NamedTuple):
    """The columns of two matrices beside each other, those of each times a factor."""

    result: int
    sources: tuple[int, int]
    factors: tuple[float, float]


class Gather(NamedTuple):
    """The joining of a tensor of all processes that share the steps of sequences, along a new first dim by rank."""

    result: int
    source: int


class Places(NamedTuple):
    """The making of a tensor (1,) int32 with the rank of the process."""

    result: int


class Describe(NamedTuple):
    """The making of a TMA descriptor of a tensor."""

    result: int
    base: int
    descriptor: Any  # shape, strides and block_shape as attributes


class Launch(NamedTuple):
    """The launch of a kernel."""

    kernel: Any  # the Triton kernel
    compiled: Any  # as Triton compiled it, or promised by `side_by_side`; None where kernels are interpreted
    grid: tuple[int, ...]
    read: tuple[int, ...]  # the tensors and descriptors that it reads or writes, its first arguments; -1 is None
    numbers: tuple[float, ...]  # its next arguments
    constants: dict[str, Any]
    num_warps: int


Step = (
    Allocate | Fill | Copy | Resize | Rows | Tiles | AddTiles | SumOf | ScaledColumns | Gather | Places | Describe
    | Launch
)  # fmt: skip


class LaunchPlan(NamedTuple):
    """The steps of one call. Tensors are numbered: the given ones first, then others as steps make them."""

    given: tuple[bool, ...]  # whether each input is there
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # the numbers of the results; a given tensor among them is overwritten
    meta: dict[int, Tensor]  # tensors of the meta device, which have the shapes and dtypes of all tensors


class PlannedExchange(NamedTuple):
    """An exchange whose collectives are steps of a plan, see :class:`tfla.backends.base.Exchange`.

    One plan serves all processes: each has one span, whose place is its rank, which the plan reads where it runs.
    """

    processes: int
    final: bool

    @property
    def positions(self) -> tuple[int, ...]:
        """A place for the only span of a process."""
        return (0,)

    def places(self, like: Tensor) -> Tensor:
        """Return a tensor that stands for the place."""
        return like.new_empty(1, dtype=torch.int32)

    def start(self, rows: Tensor) -> Tensor:
        """Return a tensor that stands for the rows of all processes."""
        return rows.new_empty(self.processes, *rows.shape)

    def finish(self, gathered: Tensor) -> Tensor:
        """Return the rows of all processes."""
        return gathered


class PlanRecorder(LaunchRecorder):
    """A recorder whose steps are data. Kernels are compiled for the planned GPU and do not run.

    A result may be one of the given tensors, which the call then overwrites.
    """

    one_pointer_each = True

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__(given)
        self.plan: list[Step] = []
        self.views: list[Tensor] = []  # with the numbers of the tensors whose memory they have
        self.spare: list[Tensor] = []  # tensors that no later step reads
        self.passing: list[Tensor] | None = None  # those that the body of `temporary` has, or None outside of one

    def _new_number(self, x: Any) -> int:
        """Return the number of a new tensor or descriptor."""
        self._number(x)
        return self.numbers[id(x)]

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Record the allocation of a tensor, unless there is one to spare."""
        found = [t for t in self.spare if (t.shape, t.dtype) == (shape, dtype)] if self.passing is not None else []
        if found:
            made = found[0]
            self.spare = [t for t in self.spare if t is not made]
        else:
            made = torch.empty(shape, dtype=dtype, device=self.device)
            self.plan.append(Allocate(self._new_number(made), tuple(shape), dtype))
        if self.passing is not None:
            self.passing.append(made)
        return made

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """Let a later such body have the tensors that this one allocates.

        Each launch is given what the one before has left in a tensor. Two bodies with the same tensors therefore run
        one after the other, whatever the host could do side by side.
        """
        around, self.passing = self.passing, []
        yield
        self.spare += self.passing
        self.passing = around

    def reuse(self, memory: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return the memory where it has this shape, else record an allocation: hosts find free memory themselves."""
        return memory if memory.shape == shape else self.new(*shape, dtype=memory.dtype)

    def resize(self, x: Tensor, *shape: int) -> Tensor:
        """Record the padding or cutting of a tensor."""
        made = torch.empty(shape, dtype=x.dtype, device=self.device)
        self.plan.append(Resize(self._new_number(made), self.numbers[id(x)], tuple(shape)))
        return made

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Record the taking of rows."""
        made = x[start:stop]
        self.plan.append(Rows(self._new_number(made), self.numbers[id(x)], start, stop))
        return made

    def tiles(self, x: Tensor, rows: int, start: int, stop: int) -> Tensor:
        """Record the copying of tiles."""
        made = some_tiles(rows, start, stop, x)
        self.plan.append(Tiles(self._new_number(made), self.numbers[id(x)], rows, start, stop))
        return made

    def add_tiles(self, total: Tensor, start: int, stop: int, x: Tensor, index: int) -> None:
        """Record the addition of sums over tiles."""
        self.plan.append(AddTiles(self.numbers[id(total)], start, stop, self.numbers[id(x)], index))

    def sum_of(self, x: Tensor, index: int) -> Tensor:
        """Record a sum."""
        made = torch.empty(x.shape[2:], dtype=x.dtype, device=self.device)
        self.plan.append(SumOf(self._new_number(made), self.numbers[id(x)], index))
        return made

    def scaled_columns(self, a: Tensor, of_a: float, b: Tensor, of_b: float) -> Tensor:
        """Record the scaling and joining of columns."""
        made = torch.empty(a.shape[0], a.shape[1] + b.shape[1], dtype=a.dtype, device=self.device)
        sources = self.numbers[id(a)], self.numbers[id(b)]
        self.plan.append(ScaledColumns(self._new_number(made), sources, (of_a, of_b)))
        return made

    def placeholder(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Record the allocation of a tensor without elements."""
        return self.new(*shape, dtype=dtype)

    def do(self, fn: Callable[..., Any], *read: Any) -> Any:
        """Record an operation: `Tensor.zero_`, `fill_with_ones`, `Tensor.copy_`, or the making of a TMA descriptor.

        A view is no step: it has the number of the tensor that it is of, and kernels get its strides.

        Raises:
            NotImplementedError: it is another operation, which plans do not have.
        """
        if fn is Tensor.zero_:
            self.plan.append(Fill(self.numbers[id(read[0])]))
            return read[0]
        if fn is fill_with_ones:
            self.plan.append(Fill(self.numbers[id(read[0])], 1.0))
            return read[0]
        if fn is Tensor.copy_:
            self.plan.append(Copy(*(self.numbers[id(t)] for t in read)))
            return read[0]
        made = fn(*read)
        if isinstance(getattr(fn, "__self__", None), PlannedExchange):
            if fn.__name__ == "start":
                self.plan.append(Gather(self._new_number(made), self.numbers[id(read[0])]))
            elif fn.__name__ == "places":
                self.plan.append(Places(self._new_number(made)))
            return made
        if isinstance(made, Tensor) and made._base is not None and made._base is read[0]:
            self.views.append(made)
            self.numbers[id(made)] = self.numbers[id(read[0])]
            return made
        if isinstance(made, Tensor):
            raise NotImplementedError(f"an operation of PyTorch, {fn}")
        self.plan.append(Describe(self._new_number(made), self.numbers[id(read[0])], made))
        return made

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, tunable: bool = False,
        compilation: Mapping[str, str | int] | None = None, **constants: Any,
    ) -> None:  # fmt: skip
        """Record a launch and compile its kernel, see :meth:`.LaunchRecorder.launch`."""
        compiled = None
        if not INTERPRETED:
            options = {"enable_fp_fusion": True, "num_warps": num_warps, **(compilation or {})}
            compiled = side_by_side.compile_kernel(kernel, *args, grid=grid, **options, **constants)
        count = next((n for n, x in enumerate(args) if isinstance(x, int | float)), len(args))
        read = tuple(-1 if x is None else self.numbers[id(x)] for x in args[:count])
        self.plan.append(Launch(kernel, compiled, grid, read, tuple(args[count:]), constants, num_warps))

    def finish(self, results: Sequence[Tensor]) -> LaunchPlan:
        """Return the plan of a call with these results."""
        meta = {n: x for n, x in enumerate(self.made) if isinstance(x, Tensor)}
        numbers = tuple(self.numbers[id(t)] for t in results)
        return LaunchPlan(tuple(t is not None for t in self.given), tuple(self.plan), numbers, meta)


class _AbsentDriver:
    """The part of a Triton driver that compilation needs, for a GPU that PyTorch need not see."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        """Return what kernels are compiled for."""
        return self.target

    def get_current_device(self) -> str:
        """Return the key under which Triton keeps compiled kernels; that of a GPU of PyTorch is its number."""
        return f"planned {self.target.arch}"

    def get_current_stream(self, device: object = None) -> int:
        """Return a stream, which is not used."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return a C type; no launcher is compiled."""
        return "int"


_LOCK = threading.RLock()


@contextlib.contextmanager
def planning_side_by_side(gpu: PlannedGPU) -> Iterator[None]:
    """Plan as in :func:`planning`, with kernels that are compiled side by side."""
    with planning(gpu), side_by_side.compiled_side_by_side():
        yield


@contextlib.contextmanager
def planning(gpu: PlannedGPU) -> Iterator[None]:
    """Let launch code in the body of a `with` statement plan for a GPU, which need not be there.

    One thread at a time plans, because Triton has one active driver for all threads.

    Args:
        gpu: The GPU whose kernels are compiled.
    """
    with _LOCK, planned_for(gpu):
        if INTERPRETED:
            yield
            return
        # From Triton 3.5 on, `active` would make the default driver, which initializes PyTorch's CUDA.
        before = driver._active if hasattr(driver, "_active") else driver.active
        driver.set_active(_AbsentDriver(gpu.architecture))
        try:
            yield
        finally:
            driver.set_active(before)


def like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a dense tensor of the meta device, which stands for one of the planned GPU."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
