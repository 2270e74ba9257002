"""Calls that take the host little time.

Triton looks a kernel up by every argument of every launch, and what a call allocates and launches takes the host longer
to work out than small sequences take the GPU. It follows from the sizes of what the call reads: a call notes it on a
`Tape`, and calls like it do what the tape has, in its order, for their own tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends.gpu.at_exit import settle_at_exit
from tfla.backends.gpu.descriptors import remember

AUTOTUNE = "TFLA_AUTOTUNE"  # environment variable: "1" before the first call has Triton time warps and stages


@functools.cache
def autotuned(kernel: Any, constants: tuple[str, ...], stages: int) -> Any:
    """By Triton's autotuner, once for all of these constants: four configurations."""
    configs = [triton.Config({"STAGES": n}, num_warps=warps) for warps in (4, 8) for n in (stages, stages + 1)]
    return triton.autotune(configs, key=[name for name in constants if name != "STAGES"])(kernel)


class _Thread(threading.local):
    has_context = False


_THREAD = _Thread()


def _make_context_current(device: torch.device) -> None:
    """CUDA's, in a thread that has none yet: allocating from PyTorch's cache does not, and Triton does it when a kernel
    is launched, by when tensor descriptors have been encoded, which needs one."""
    if device.type == "cuda" and not _THREAD.has_context:
        torch.zeros(1, device=device)
        _THREAD.has_context = True
        if threading.current_thread() is not threading.main_thread():  # one of PyTorch's backwards, mostly
            settle_at_exit(device)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _heard() -> bool:
    """Whether a hook is set that wants to know of launches; later Tritons have chains of them, which may be empty."""
    knobs = triton.knobs.runtime
    return bool(
        getattr(knobs.launch_enter_hook, "calls", knobs.launch_enter_hook)
        or getattr(knobs.launch_exit_hook, "calls", knobs.launch_exit_hook)
    )


class Bound:
    """Launches a compiled kernel on a grid. Past Triton's own way, which asks for the stream each time and describes
    the launch to hooks, unless there are some."""

    def __init__(self, kernel: Any, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.way: tuple[Any, Any, Any] | None = None  # known once it has been loaded

    def __call__(self, stream: int, heard: bool, args: list[Any]) -> None:
        """On this stream; `heard`: there are hooks."""
        if heard or self.way is None:
            self.kernel[self.grid](*args, stream=stream)
            remember(self.kernel)
            with contextlib.suppress(AttributeError):  # in a Triton that keeps them elsewhere
                self.way = self.kernel.run, self.kernel.function, self.kernel.packed_metadata
            return
        run, function, metadata = self.way
        run(*self.grid, stream, function, metadata, None, None, None, *args)


@functools.cache
def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a graph may keep it
        return torch.empty(shape, dtype=dtype, device=device)


# What is called; places of what it reads; of a launch the other arguments, else whether it makes a tensor.
Step = tuple[Callable[..., Any], tuple[int, ...], list[Any] | bool]


class Tape:
    """What a call does with tensors, while it does so: each step reads tensors by their places, first those that are
    given, then what steps made. Nothing else may touch them."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        self.device = next(t.device for t in given if t is not None)
        self.made: list[Any] = []
        self.places: dict[int, int] = {}
        self.steps: list[Step] = []
        self.versions: dict[int, int] = {}
        for t in given:
            self._place(t)

    def _place(self, x: Any) -> None:
        if x is not None:
            self.places.setdefault(id(x), len(self.made))
        self.made.append(x)  # held, so that no other gets its id

    def _note(self, fn: Callable[..., Any], read: Sequence[Any], rest: list[Any] | bool) -> None:
        self.steps.append((fn, tuple([self.places[id(x)] for x in read]), rest))

    def do(self, fn: Callable[..., Any], *read: Any) -> Any:
        """fn(*read), a tensor or a tensor descriptor, which may be one that it wrote in place."""
        made = fn(*read)
        self._note(fn, read, isinstance(made, Tensor))
        self._place(made)
        self.versions |= {id(x): x._version for x in (made, *read) if isinstance(x, Tensor) and not x.is_inference()}
        return made

    def untouched(self) -> bool:
        """Whether nothing but `do` wrote what steps made, as far as PyTorch counts that."""
        return all(
            self.versions.get(id(x), x._version) == x._version
            for x in self.made
            if isinstance(x, Tensor) and not x.is_inference()
        )

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made: Tensor = self.do(functools.partial(torch.empty, shape, dtype=dtype, device=self.device))
        return made

    def nothing(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """For what was not asked for, of no elements: one tensor for all calls."""
        nothing = _nothing(shape, dtype, self.device)
        found: Tensor = self.do(lambda: nothing)
        return found

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, tunable: bool = False, **constants: Any
    ) -> None:
        """As kernel[grid](*args, num_warps=num_warps, **constants), the constants being the last parameters and
        tensors and their descriptors the first.

        tunable: its warps and stages are free, and it may run twice, since it reads nothing that it writes.
        """
        options = {"enable_fp_fusion": True}  # which Triton 3.10 no longer does unasked
        if tunable and os.environ.get(AUTOTUNE) == "1":
            chosen = {name: x for name, x in constants.items() if name != "STAGES"}
            run = functools.partial(autotuned(kernel, tuple(constants), constants["STAGES"])[grid], **options, **chosen)
        else:
            run = functools.partial(kernel[grid], num_warps=num_warps, **options, **constants)
        compiled = run(*args)
        count = next((n for n, x in enumerate(args) if isinstance(x, int | float)), len(args))
        assert all(isinstance(x, int | float) for x in args[count:]), "tensors come first"
        if compiled is None:  # interpreted
            self._note(lambda stream, heard, args: run(*args), args[:count], [*args[count:]])
        else:  # constants are compiled in, and passed in whatever order
            self._note(Bound(compiled, grid), args[:count], [*args[count:], *constants.values()])


def _itself(x: Tensor) -> Tensor:
    return x


class Program:
    """The steps of a tape, for other tensors of the same sizes."""

    def __init__(self, tape: Tape, results: Sequence[Tensor]) -> None:
        self.steps = tape.steps
        self.results = [tape.places[id(t)] for t in results]
        self.device = tape.device
        self.index = tape.device.index if tape.device.type == "cuda" else None
        # As compiled kernels take tensors, and Triton's interpreter.
        self.address: Callable[[Tensor], Any] = _itself if self.index is None else Tensor.data_ptr

    def __call__(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        if self.index is None or self.index == torch.cuda.current_device():
            return self._run(given)
        with torch.cuda.device(self.index):
            return self._run(given)

    def _run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        _make_context_current(self.device)
        triton.set_allocator(_allocate)
        heard, stream = _heard(), 0 if self.index is None else torch._C._cuda_getCurrentRawStream(self.index)
        address: Callable[[Any], Any] = self.address
        made: list[Any] = [*given]
        addresses: list[Any] = [None if x is None else address(x) for x in made]
        for fn, read, rest in self.steps:
            if rest is True or rest is False:
                x = fn(*[made[place] for place in read])
                made.append(x)
                addresses.append(address(x) if rest else x)
            else:
                fn(stream, heard, [addresses[place] for place in read] + rest)
        return [made[place] for place in self.results]


_PROGRAMS: CallCache[Program] = CallCache()


def program(call: Hashable) -> Program | None:
    """What calls like this one do, if there has been one."""
    return _PROGRAMS.get(call)


def repeated(
    call: Hashable, given: Sequence[Tensor | None], first: Callable[[Tape, list[Tensor | None]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """`first` of a tape and the given tensors, or what it noted at a former call like this one.

    call: all that it depends on, :func:`~tfla.backends.base.static` of what is given included.
    """
    known = program(call)
    if known is not None:
        return known(given)
    apart: list[Tensor | None] = []  # a tensor that is given twice is two to the next call
    for t in given:
        apart.append(t.detach() if t is not None and any(t is other for other in apart) else t)
    tape = Tape(apart)
    triton.set_allocator(_allocate)
    with torch.cuda.device(tape.device) if tape.device.type == "cuda" else contextlib.nullcontext():
        _make_context_current(tape.device)
        results = first(tape, apart)
    assert tape.untouched(), "what a tape made was written without it"
    _PROGRAMS.add(call, Program(tape, results))
    return results
