"""The part of Gluon and of Triton's language that the Hopper kernels use, for PyTorch on a CPU."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gluon_simulator import memory
from gluon_simulator.memory import BLOCK, Barrier, Descriptor, Shared
from gluon_simulator.program import current, run
from gluon_simulator.values import Block, Number, Pointer, common, plain, tensor

SEED = 0  # seed of the random order in which partitions run


class constexpr:
    """The annotation of constexpr parameters; a call returns its argument."""

    def __new__(cls, value: Any) -> Any:
        return value


class Kernel:
    """A jitted function, which is called inside of kernels, or launched over a grid as a kernel."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.__name__ = fn, fn.__name__
        self.parameters = inspect.signature(fn).parameters
        fn.__globals__["range"] = counted

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.fn(*args, **named)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, enable_fp_fusion: bool = True, maxnreg: int = 255, **constants: Any
        ) -> None:
            given = inspect.signature(self.fn).bind(*args, **constants).arguments
            constant = {name for name, x in self.parameters.items() if x.annotation is constexpr}
            args_of = {name: x if name in constant else _argument(x) for name, x in given.items()}
            run(lambda: self.fn(**args_of), grid, num_warps, SEED)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.to_first(x)
    if isinstance(x, int):
        return Number(x, torch.int32 if abs(x) < 2**31 else torch.int64)
    if isinstance(x, float):
        return Number(torch.tensor(x, dtype=torch.float32).item(), torch.float32)
    return Descriptor(x) if hasattr(x, "block_shape") else x


def counted(*limits: Any) -> Iterator[Any]:
    """Return `range(*limits)`, of the kernel's numbers if a limit is one of these."""
    if any(isinstance(x, Number) for x in limits):
        return map(_int32, range(*map(int, limits)))
    return iter(range(*limits))


def _int32(x: int) -> Number:
    return Number(x, torch.int32)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if fn is None else Kernel(fn)


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, Number) and not isinstance(x, Block) and not isinstance(y, Block):
        return Number(plain(x if condition else y), common(x, y))
    kind = common(x, y)
    return Block(torch.where(tensor(condition), tensor(x, kind), tensor(y, kind)))


def _with(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return `fn` for numbers and blocks: a block if an argument is one, else a number."""

    def applied(*xs: Any) -> Any:
        kind = next(x.dtype for x in xs if isinstance(x, Block | Number))
        made = fn(*(tensor(x, kind) for x in xs))
        return Block(made) if any(isinstance(x, Block) for x in xs) else Number(made.item(), kind)

    return applied


def load(pointer: Pointer, mask: Any = None, other: Any = 0, eviction_policy: str = "") -> Any:
    at, wanted = pointer.elements(mask)
    storage = pointer.storage if pointer.storage.numel() else pointer.storage.new_zeros(1)
    found = storage[torch.where(wanted, at, 0)]
    found = torch.where(wanted, found, tensor(other, found.dtype))
    return Block(found) if at.ndim else Number(found.item(), found.dtype)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, wanted = pointer.elements(mask)
    value = torch.broadcast_to(tensor(value, pointer.storage.dtype), at.shape)
    pointer.storage[at[wanted]] = value[wanted]


def atomic_add(pointer: Pointer, value: Any, sem: str, scope: str) -> Any:
    """Add to one element, and return its old value."""
    before = load(pointer)
    store(pointer, before + value)
    return before


def atomic_xchg(pointer: Pointer, value: Any, sem: str, scope: str) -> Any:
    before = load(pointer)
    store(pointer, value)
    return before


def associative_scan(x: Block, axis: int, combine: Callable[[Any, Any], Any]) -> Block:
    """Return the inclusive scan along an axis, by doubling."""
    data, step = x.data.movedim(axis, 0), 1
    while step < data.shape[0]:
        joined = combine(Block(data[:-step]), Block(data[step:])).data
        data, step = torch.cat([data[:step], joined]), 2 * step
    return Block(data.movedim(0, axis))


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: torch.dtype, is_pure: bool, pack: int
) -> Any:
    """Run inline assembly: moves, arithmetic, reciprocals, powers of 2, bounds, prefetches, waits for TMA stores.

    Predicates are those of the one thread of a warp that `elect.sync` elects.
    """
    results = constraints.count("=")  # two are those of a pair of elements
    registers: dict[str, Any] = {f"${i + results}": plain(x) for i, x in enumerate(args)}
    for line in filter(None, (line.strip() for line in asm.strip("{} ").split(";"))):
        name, rest = re.split(r"\s+", line.removeprefix("@p "), maxsplit=1)
        target, *read = re.split(r"\s*,\s*", rest)
        given = [registers.get(x, x) for x in read]
        wide = [x.double() if isinstance(x, Tensor) else x for x in given]
        if name.startswith((".reg", "elect.sync", "pmevent")):
            continue
        elif name == "cp.async.bulk.prefetch.L2.global":
            memory.prefetch(registers[target.strip("[]")], *given)
        elif name == "cp.async.bulk.wait_group":
            memory.store_wait(int(target))
        elif name.startswith("mov."):
            (registers[target],) = wide
        elif results == 2 and name in ("shl.b32", "and.b32"):  # bfloat16 numbers are the high halves of float32 ones
            registers[target] = wide[0].to(dtype)
        elif name.startswith("rcp."):
            registers[target] = (1 / wide[0]).to(dtype)
        elif name.startswith("ex2."):
            registers[target] = wide[0].exp2().to(dtype)
        elif name.startswith("mul.rn."):
            registers[target] = (wide[0] * wide[1]).to(dtype)
        elif name.startswith("fma.rn."):
            registers[target] = (wide[0] * wide[1] + wide[2]).to(dtype)
        elif name.startswith(("max.NaN.", "min.NaN.")):
            registers[target] = getattr(torch, f"{name[:3]}imum")(*wide).to(dtype)
        elif name.startswith("set.equ."):  # equal, or one of them NaN
            registers[target] = (wide[0] == wide[1]) | (wide[0].isnan() | wide[1].isnan())
        elif name.startswith("and."):  # of a number and a comparison
            registers[target] = torch.where(wide[1] != 0, wide[0], 0).to(dtype)
        else:
            raise NotImplementedError(line)
    made = registers["$0"]
    return Block(made) if isinstance(made, Tensor) else Number(made, dtype)


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        bars = [Barrier() for _ in range(shape[0])]
        return bars[0] if len(shape) == 1 else Barriers(bars)
    current().last_allocation = current().tick()
    return Shared.allocate(dtype, shape, BLOCK if len(shape) > 1 and layout != "swizzled" else 1)


class Barriers:
    def __init__(self, bars: list[Barrier]) -> None:
        self.bars = bars

    def index(self, i: Any) -> Barrier:
        return self.bars[int(i)]


def arrive(bar: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        bar.arrive(count)
    current().partition.barrier()  # Triton emits it, too; the arrival does not rely on it here


def fence_async_shared() -> None:
    program = current()
    program.partition.fence()
    for bar in program.barriers:
        bar.fenced = True


def _nothing(*args: Any, **named: Any) -> None:
    return None


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (*_FLOATS, torch.int8, torch.int32, torch.int64)}
_COMMON = {
    **_DTYPES,
    "constexpr": constexpr,
    "where": where,
    "exp": _with(torch.exp),
    "exp2": _with(torch.exp2),
    "rsqrt": _with(torch.rsqrt),
    "log": _with(torch.log),
    "log2": _with(torch.log2),
    "abs": _with(torch.abs),
    "associative_scan": associative_scan,
    "maximum": _with(torch.maximum),
    "minimum": _with(torch.minimum),
    "inline_asm_elementwise": inline_asm_elementwise,
    "load": load,
    "store": store,
    "program_id": lambda axis: _int32(current().ids[axis]),
    "num_programs": lambda axis: _int32(current().grid[axis]),
}
GL = _module(
    "triton.experimental.gluon.language",
    **_COMMON,
    SliceLayout=_nothing,
    BlockedLayout=_nothing,
    DotOperandLayout=_nothing,
    NVMMADistributedLayout=_nothing,
    DistributedLinearLayout=_nothing,
    NVMMASharedLayout=_nothing,
    SharedLinearLayout=_nothing,
    SwizzledSharedLayout=lambda *sizes: "swizzled",
    arange=lambda start, end, layout=None: Block(torch.arange(start, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: Block(torch.zeros(shape, dtype=dtype)),
    sum=lambda x, axis: Block(x.data.sum(axis)),
    max=lambda x, axis: Block(x.data.amax(axis)) if x.data.ndim > 1 else Number(x.data.amax().item(), x.dtype),
    reshape=lambda x, shape: Block(x.data.reshape(shape)),
    permute=lambda x, order: Block(x.data.permute(order)),
    expand_dims=lambda x, axis: Block(x.data.unsqueeze(axis)),
    split=lambda x: tuple(map(Block, x.data.unbind(-1))),
    join=lambda x, y: Block(torch.stack([x.data, y.data], -1)),
    broadcast=lambda x, y: tuple(map(Block, torch.broadcast_tensors(x.data, y.data))),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    to_tensor=lambda x: x if isinstance(x, Number) else _int32(x),
    static_range=range,
    allocate_shared_memory=allocate_shared_memory,
    atomic_add=atomic_add,
    atomic_xchg=atomic_xchg,
    barrier=lambda: current().partition.barrier(),
    warp_specialize=lambda work, warps, registers: current().specialize(work, warps),
)
TL = _module(
    "triton.language",
    **_COMMON,
    cdiv=lambda x, y: (x + y - 1) // y,
    gather=lambda x, index, axis: Block(torch.gather(x.data, axis, index.data.long())),
)
MBARRIER = _module(
    "mbarrier",
    MBarrierLayout=lambda: Barrier,
    init=lambda bar, count: bar.init(count),
    expect=lambda bar, size: bar.expect(size),
    wait=lambda bar, phase: bar.wait(int(phase)),
    arrive=arrive,
    invalidate=lambda bar: bar.invalidate(),
)
TMA = _module(
    "tma",
    async_load=memory.async_load,
    async_store=memory.async_store,
    async_atomic_add=memory.async_add,
    store_wait=memory.store_wait,
)
HOPPER = _module(
    "triton.experimental.gluon.language.nvidia.hopper",
    mbarrier=MBARRIER,
    tma=TMA,
    fence_async_shared=fence_async_shared,
    warpgroup_mma=memory.warpgroup_mma,
    warpgroup_mma_wait=memory.warpgroup_mma_wait,
)
AMPERE = _module("triton.experimental.gluon.language.nvidia.ampere", mma_v2=memory.mma_v2)
CORE = _module("triton.experimental.gluon.language._core", builtin=lambda fn: fn, ir=None)
GLUON = _module("triton.experimental.gluon", jit=jit, constexpr_function=lambda fn: fn, language=GL)
TRITON = _module("triton", jit=jit, language=TL)
EXPERIMENTAL = _module("triton.experimental", gluon=GLUON)
MODULES = {module.__name__: module for module in (TRITON, TL, EXPERIMENTAL, GLUON, GL, CORE, AMPERE, HOPPER)}
