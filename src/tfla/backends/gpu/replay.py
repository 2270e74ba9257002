"""The recording of a call's launches, and their replay on other tensors.

Triton looks a kernel up by every argument of every launch. For short sequences this look-up, and the work of deriving
allocations and launches from the inputs, takes longer than the GPU takes to compute. All of it depends only on the
signature of the call: shapes, strides, dtypes, alignments and options. The first call with a signature therefore runs
with a :class:`LaunchRecorder`; later calls replay its steps on their own tensors (:class:`RecordedLaunches`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from tfla._util.caching import CallCache
from tfla.backends.gpu.at_exit import settle_at_exit
from tfla.backends.gpu.descriptors import cache_descriptors

AUTOTUNE = "TFLA_AUTOTUNE"  # environment variable; set to "1" before the first call, it turns autotuning on


@functools.cache
def autotuned(kernel: Any, constants: tuple[str, ...], stages: int) -> Any:
    """Return the kernel under Triton's autotuner with four configurations, tuned once for each set of constants."""
    configs = [triton.Config({"STAGES": n}, num_warps=warps) for warps in (4, 8) for n in (stages, stages + 1)]
    return triton.autotune(configs, key=[name for name in constants if name != "STAGES"])(kernel)


class _Thread(threading.local):
    """The state of the current thread."""

    has_context = False  # whether a CUDA context is current in it


_THREAD = _Thread()


def _make_context_current(device: torch.device) -> None:
    """Make the CUDA context of `device` current in this thread, if none is.

    The encoding of TMA descriptors needs a current context. An allocation from PyTorch's cache does not make it
    current, and Triton does so only at the launch, which comes after the encoding.
    """
    if not _THREAD.has_context and device.type == "cuda":  # the first test takes a fraction of the host time
        torch.zeros(1, device=device)
        _THREAD.has_context = True
        if threading.current_thread() is not threading.main_thread():  # such as PyTorch's backward thread
            settle_at_exit(device)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the global memory in which a kernel makes its TMA descriptors, as Triton asks for it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch_hooks_active() -> bool:
    """Return whether a launch hook is set; later versions of Triton have chains of hooks, which may be empty."""
    knobs = triton.knobs.runtime
    return bool(
        getattr(knobs.launch_enter_hook, "calls", knobs.launch_enter_hook)
        or getattr(knobs.launch_exit_hook, "calls", knobs.launch_exit_hook)
    )


class CompiledLaunch:
    """A compiled kernel with its grid.

    A call launches it directly through the driver, past Triton's launcher, which asks for the stream each time and
    describes the launch to hooks. Where a hook is set, the launch goes through Triton's launcher.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        # The driver's launch function, the kernel's handle and its metadata; None until the kernel has been loaded.
        self.driver_launch: tuple[Any, Any, Any] | None = None

    def __call__(self, stream: int, hooks_active: bool, args: list[Any]) -> None:
        """Launch the kernel on `stream`; with `hooks_active` through Triton's launcher, which calls the hooks."""
        if hooks_active or self.driver_launch is None:
            self.kernel[self.grid](*args, stream=stream)
            cache_descriptors(self.kernel)
            with contextlib.suppress(AttributeError):  # other versions of Triton name these otherwise
                self.driver_launch = self.kernel.run, self.kernel.function, self.kernel.packed_metadata
            return
        run, function, metadata = self.driver_launch
        run(*self.grid, stream, function, metadata, None, None, None, *args)


@functools.cache
def _shared_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one empty tensor of this shape, dtype and device that all calls share."""
    with torch.inference_mode(False):  # a normal tensor, since an autograd graph may keep it
        return torch.empty(shape, dtype=dtype, device=device)


def resized(shape: tuple[int, ...], x: Tensor) -> Tensor:
    """Return a dense copy of x of this shape: each dim is cut or padded with zeros at its end."""
    last_first = zip(reversed(shape), reversed(x.shape), strict=True)
    return pad(x, [n for new, old in last_first for n in (0, new - old)]).contiguous()


def some_tiles(rows: int, start: int, stop: int, x: Tensor) -> Tensor:
    """Return a dense copy of the tiles [start, stop) of each of `rows` batch rows of x, (H, rows * tiles, ...)."""
    return x.unflatten(1, (rows, -1))[:, :, start:stop].flatten(1, 2).contiguous()


def add_tiles(index: int, start: int, stop: int, total: Tensor, x: Tensor) -> Tensor:
    """Add x[index], (H, rows * tiles, ...), summed over the tiles of each row, to total[start:stop], (rows, H, ...)."""
    total[start:stop] += x[index].unflatten(1, (stop - start, -1)).sum(2).transpose(0, 1)
    return total


def fill_with_ones(x: Tensor) -> Tensor:
    """Write 1 to all of x and return it."""
    return x.fill_(1.0)


# A recorded step is a function, the numbers of the operands that it reads, and one of these:
#   a list    The step is a launch, and the list has its further arguments.
#   a bool    The result of the step is the next operand, which is a tensor (True) or a tensor descriptor (False).
#   None      The step drops its operands, so that later steps can be given their memory.
Step = tuple[Callable[..., Any], tuple[int, ...], list[Any] | bool | None]
RELEASED_BYTES = 1 << 20  # smaller tensors stay until the end of a replay, whose host time counts for short sequences


class LaunchRecorder:
    """A recorder of the allocations, tensor operations and kernel launches of one call.

    Operands are numbered: the given tensors first, then each result in the order of its creation. Every step reads its
    operands by number, so that it can be replayed on other tensors of the same shapes. All that the call does with
    tensors has to go through the recorder.

    Args:
        given: the inputs of the call, None for those that are left out.

    Attributes:
        given: the inputs.
        results: the results of the call in their order, which the launch code sets.
        one_pointer_each: whether a launch gets a tensor by one parameter, and by the last of its tensors once more.
    """

    one_pointer_each = False

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        self.given = given
        self.results: Sequence[Tensor] = ()
        self.device = next(t.device for t in given if t is not None)
        self.made: list[Any] = []  # all operands, by number
        self.numbers: dict[int, int] = {}  # the number of each operand, by its id
        self.steps: list[Step] = []
        self.versions: dict[int, int] = {}  # PyTorch's version counter of each tensor after its last step, by its id
        for t in given:
            self._number(t)

    def _number(self, x: Any) -> None:
        """Give the next number to operand x."""
        if x is not None:
            self.numbers.setdefault(id(x), len(self.made))
        self.made.append(x)  # keeps x alive, so that its id stays unique

    def _record(self, fn: Callable[..., Any], read: Sequence[Any], rest: list[Any] | bool) -> None:
        """Append a step that reads the operands `read`."""
        self.steps.append((fn, tuple([self.numbers[id(x)] for x in read]), rest))

    def do(self, fn: Callable[..., Any], *read: Any) -> Any:
        """Call fn(*read), record the step and return the result.

        The result is a tensor or a tensor descriptor. It may be one of `read`, written in place.
        """
        made = fn(*read)
        self._record(fn, read, isinstance(made, Tensor))
        self._number(made)
        self.versions |= {id(x): x._version for x in (made, *read) if isinstance(x, Tensor) and not x.is_inference()}
        return made

    def only_recorded_writes(self) -> bool:
        """Return whether, by PyTorch's version counters, no tensor was written outside of recorded steps."""
        return all(
            self.versions.get(id(x), x._version) == x._version
            for x in self.made
            if isinstance(x, Tensor) and not x.is_inference()
        )

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a tensor of this shape."""
        made: Tensor = self.do(functools.partial(torch.empty, shape, dtype=dtype, device=self.device))
        return made

    def reuse(self, memory: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the memory of a dense one, from element `offset` on.

        The caller does not read `memory` before it has written it again, so that a plan may have another tensor here.
        """
        size = math.prod(shape)
        found: Tensor = self.do(lambda t: t.view(-1)[offset : offset + size].view(shape), memory)
        return found

    def temporary(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: no tensor that its body allocates is read after it, so the next one can reuse it.

        Replays give the memory back in any case, after the last step that needs it.
        """
        return contextlib.nullcontext()

    def resize(self, x: Tensor, *shape: int) -> Tensor:
        """Return a dense copy of x of this shape: each dim is cut or padded with zeros at its end."""
        made: Tensor = self.do(functools.partial(resized, shape), x)
        return made

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return rows of the first dim of x, a view; no launch uses x and the view at once."""
        found: Tensor = self.do(lambda t: t[start:stop], x)
        return found

    def tiles(self, x: Tensor, rows: int, start: int, stop: int) -> Tensor:
        """Return a dense copy of the tiles [start, stop) of each of `rows` batch rows of x, (H, rows * tiles, ...)."""
        found: Tensor = self.do(functools.partial(some_tiles, rows, start, stop), x)
        return found

    def add_tiles(self, total: Tensor, start: int, stop: int, x: Tensor, index: int) -> None:
        """Add x[index], (H, rows * tiles, ...), summed over the tiles of each row, to total[start:stop]."""
        self.do(functools.partial(add_tiles, index, start, stop), total, x)

    def sum_of(self, x: Tensor, index: int) -> Tensor:
        """Return the sum of x[index] over its first dim."""
        found: Tensor = self.do(lambda t: t[index].sum(0), x)
        return found

    def scaled_columns(self, a: Tensor, of_a: float, b: Tensor, of_b: float) -> Tensor:
        """Return the columns of two matrices beside each other, those of each times a factor."""
        found: Tensor = self.do(lambda a, b: torch.cat((a * of_a, b * of_b), 1), a, b)
        return found

    def placeholder(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor without elements for a result that was not requested; all calls share it."""
        empty = _shared_empty(shape, dtype, self.device)
        found: Tensor = self.do(lambda: empty)
        return found

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, tunable: bool = False,
        compilation: Mapping[str, str | int] | None = None, **constants: Any,
    ) -> None:  # fmt: skip
        """Launch and record kernel[grid](*args, num_warps=num_warps, **constants).

        Args:
            kernel: the Triton kernel.
            grid: the number of programs along each axis.
            args: tensors and tensor descriptors, then numbers.
            num_warps: warps of a program, unless the autotuner chooses them.
            tunable: whether the autotuner may choose the warps and the constant STAGES. The kernel then runs several
                times, so it must not read what it writes.
            compilation: further options of Triton for the compilation of this kernel.
            constants: the constexpr parameters, which are the last ones of the kernel.
        """
        options = {"enable_fp_fusion": True, **(compilation or {})}  # fusion is off by default from Triton 3.10 on
        if tunable and os.environ.get(AUTOTUNE) == "1":
            chosen = {name: x for name, x in constants.items() if name != "STAGES"}
            run = functools.partial(autotuned(kernel, tuple(constants), constants["STAGES"])[grid], **options, **chosen)
        else:
            run = functools.partial(kernel[grid], num_warps=num_warps, **options, **constants)
        compiled = run(*args)
        count = next((n for n, x in enumerate(args) if isinstance(x, int | float)), len(args))  # of operands
        assert all(isinstance(x, int | float) for x in args[count:]), "tensors come first"
        if compiled is None:  # interpreted
            self._record(lambda stream, hooks_active, args: run(*args), args[:count], [*args[count:]])
        else:  # constants are compiled in; the launch ignores their values and order
            self._record(CompiledLaunch(compiled, grid), args[:count], [*args[count:], *constants.values()])


def _itself(x: Tensor) -> Tensor:
    """Return x, which is the form in which Triton's interpreter takes tensors."""
    return x


def _nothing() -> None:
    """Stand for the function of a step that drops operands."""


def with_releases(recorder: LaunchRecorder) -> list[Step]:
    """Return the recorded steps, with one that drops large tensors after each step that is the last to need them.

    Launches on one stream run in their order, so memory that is given back after a launch is not written before it ran.
    A tensor descriptor has an address, so what it was made of is needed as long as it is. Both are dropped together,
    since one whose address has not been encoded before holds its tensor.
    """
    steps, next_made = recorder.steps, len(recorder.given)
    last: dict[int, int] = {}  # the last step that needs an operand, by its number
    sources: list[tuple[int, tuple[int, ...]]] = []  # of descriptors
    for i, (_, read, rest) in enumerate(steps):
        last |= dict.fromkeys(read, i)
        if isinstance(rest, bool):
            last[next_made] = i
            if not rest:
                sources.append((next_made, read))
            next_made += 1
    for descriptor, read in sources:
        last |= {n: max(last[n], last[descriptor]) for n in read}
    kept = {recorder.numbers[id(t)] for t in recorder.results}
    dropped: dict[int, list[int]] = {}
    for n, i in last.items():
        x = recorder.made[n]
        if n >= len(recorder.given) and n not in kept and isinstance(x, Tensor) and x.nbytes >= RELEASED_BYTES:
            of_it = [descriptor for descriptor, read in sources if n in read]
            dropped.setdefault(i, []).extend((n, *of_it))
    found: list[Step] = []
    for i, step in enumerate(steps):
        found.append(step)
        if i in dropped:
            found.append((_nothing, tuple(dropped[i]), None))
    return found


def direct_allocation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor] | None:
    """Return a function that allocates as `torch.empty` does, on a device that has to be the current one at each call.

    It is the function that compiled code of PyTorch calls. `torch.empty` reads its arguments by name and goes through
    the dispatcher, which takes three times as much host time.

    Returns:
        the function, or None where this version of PyTorch has none for such a device.
    """
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    strides = torch.empty(shape, device="meta").stride()
    return None if allocate is None else functools.partial(allocate, shape, strides, dtype)


def with_direct_allocations(steps: list[Step]) -> list[Step]:
    """Return the steps with direct allocations in place of calls of `torch.empty`."""
    found: list[Step] = []
    for fn, read, rest in steps:
        direct = None
        if isinstance(fn, functools.partial) and fn.func is torch.empty:
            direct = direct_allocation(fn.args[0], **fn.keywords)
        found.append((direct or fn, read, rest))
    return found


class RecordedLaunches:
    """The recorded steps of one call, to be replayed on other tensors with the same call signature.

    Args:
        recorder: the recorder of the call, after its `results` have been set.
    """

    def __init__(self, recorder: LaunchRecorder) -> None:
        self.steps = with_releases(recorder)
        self.direct_steps = with_direct_allocations(self.steps)
        self.num_given = len(recorder.given)
        self.results = [recorder.numbers[id(t)] for t in recorder.results]  # the numbers of the results
        self.device = recorder.device
        self.index = recorder.device.index if recorder.device.type == "cuda" else None
        # Compiled kernels take addresses, Triton's interpreter takes tensors.
        self.address: Callable[[Tensor], Any] = _itself if self.index is None else Tensor.data_ptr

    def with_shape(self, result: int, *shape: int) -> RecordedLaunches:
        """Return the same launches, with a result that is allocated in another shape of as many elements.

        Kernels are given addresses, so that a result in the shape that a caller needs takes no view of it.

        Args:
            result: the index of the result among the results of the call.
            shape: the other shape.
        """
        operands = [n for n, step in enumerate(self.steps) if isinstance(step[2], bool)]  # steps that make an operand
        at = operands[self.results[result] - self.num_given]
        allocate, read, rest = self.steps[at]
        assert isinstance(allocate, functools.partial), "the result is allocated by `LaunchRecorder.new`"
        changed = copy.copy(self)
        changed.steps = [*self.steps]
        changed.steps[at] = functools.partial(allocate.func, shape, **allocate.keywords), read, rest
        changed.direct_steps = with_direct_allocations(changed.steps)
        return changed

    def __call__(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Replay the steps on the given tensors, in the order of those of the recorder, and return the results."""
        if self.index is None or self.index == torch._C._cuda_getDevice():  # CUDA has been initialized
            return self._run(given)
        with torch.cuda.device(self.index):
            return self._run(given)

    def _run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Replay the steps on the current device: the list of operands grows by one with each step that makes one."""
        _make_context_current(self.device)
        triton.set_allocator(_allocate)
        hooks_active = launch_hooks_active()
        stream = 0 if self.index is None else torch._C._cuda_getCurrentRawStream(self.index)
        address: Callable[[Any], Any] = self.address
        operands: list[Any] = [*given]
        addresses: list[Any] = [None if x is None else address(x) for x in operands]
        # Deterministic algorithms include that `torch.empty` fills what it allocates.
        steps = self.steps if torch.are_deterministic_algorithms_enabled() else self.direct_steps
        for fn, read, rest in steps:
            if rest is True or rest is False:
                # The list has the only reference, since another one would keep the operand alive.
                operands.append(fn(*[operands[n] for n in read]) if read else fn())
                addresses.append(address(operands[-1]) if rest else operands[-1])
            elif rest is None:
                for n in read:
                    operands[n] = addresses[n] = None
            else:
                fn(stream, hooks_active, [addresses[n] for n in read] + rest)
        return [operands[n] for n in self.results]


_RECORDED: CallCache[RecordedLaunches] = CallCache()


def recorded_launches(call: Hashable) -> RecordedLaunches | None:
    """Return the recorded launches of calls with this signature, or None before the first such call."""
    return _RECORDED.get(call)


def recorded_steps(call: Hashable, v: Tensor, time: bool) -> RecordedLaunches | None:
    """Return the recorded launches of decoding steps, whose first result is h, or None before the first such call.

    Args:
        call: the signature of the call.
        v: the values of the first call, (B, T, H, dhv).
        time: whether h has the shape of v; else T is 1, and h is (B, H, dhv).
    """
    recorded = recorded_launches(call)
    B, _, H, V = v.shape
    return recorded if time or recorded is None else recorded.with_shape(0, B, H, V)


@contextlib.contextmanager
def recording(call: Hashable, given: Sequence[Tensor | None]) -> Iterator[LaunchRecorder]:
    """Record a call in the body of a `with` statement, which runs its launch code and sets the recorder's `results`.

    The recorded launches are kept under `call`, unless the body raises an exception.

    Args:
        call: the signature of the call, with :func:`~tfla.backends.base.static` of all given tensors.
        given: the inputs of the call. The body reads those of the recorder, among which a tensor that is given twice
            is two tensors, because the next call may give two.
    """
    distinct: list[Tensor | None] = []
    for t in given:
        distinct.append(t.detach() if t is not None and any(t is other for other in distinct) else t)
    recorder = LaunchRecorder(distinct)
    triton.set_allocator(_allocate)
    with torch.cuda.device(recorder.device) if recorder.device.type == "cuda" else contextlib.nullcontext():
        _make_context_current(recorder.device)
        yield recorder
    assert recorder.only_recorded_writes(), "a recorded tensor was written outside of the recorder"
    _RECORDED.add(call, RecordedLaunches(recorder))
