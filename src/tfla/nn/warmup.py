"""The compilation of what a model needs, before the first request comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfla.nn.decode import Decoder
from tfla.nn.model import LanguageModel
from tfla.nn.validation import check_int, check_model


@dataclass(frozen=True)
class WarmCall:
    """A kind of call that has been made once."""

    name: str
    seconds: float  # the time of the first call, compilation included
    again: float  # the time of the second call
    kernels: tuple[str, ...]  # names of the kernels that Triton compiled, or loaded from its cache


@dataclass(frozen=True)
class Warmup:
    """The record of a warm-up; its string has one line for each call."""

    device: str
    calls: tuple[WarmCall, ...]

    def __str__(self) -> str:
        if not self.calls:
            return f"{self.device}: there is nothing to compile"
        lines = [
            f"{call.name}: {call.seconds:.2f} s, again {call.again * 1e3:.1f} ms, {len(call.kernels)} kernels compiled"
            for call in self.calls
        ]
        return "\n".join(lines)


@torch.no_grad()
def warmup(
    model: LanguageModel,
    *,
    prompts: Sequence[int] = (1, 1024),
    batches: Sequence[int] = (1,),
    states_every: int | None = None,
    capacity: int | None = None,
) -> Warmup:
    """Compile what prefills and decoding steps of a model need, by calls with tokens that mean nothing.

    Triton compiles a kernel for each set of head dims, dtypes and options at the first call, which takes seconds, and
    keeps it on the disk for later processes. Kernels of other lengths are mostly the same; segments are chosen by
    length, so that the lengths should be typical ones. On a CPU there is nothing to compile, and no call is made.

    Args:
        model: the model, on its device and in its dtype.
        prompts: numbers of tokens of prompts, which are read one at a time.
        batches: numbers of sequences that decode together.
        states_every: the same argument of :meth:`LanguageModel.prefill`, if the server calls it.
        capacity: the same argument of :class:`Decoder`, for models with attention.

    Returns:
        what was compiled, and how long the calls took.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was given and what is allowed.
    """
    check_model(model)
    for name, values in (("prompts", prompts), ("batches", batches)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"{name}: got {type(values).__name__}, expected a sequence of ints")
        for value in values:
            check_int(name, value, 1)
    if states_every is not None:
        check_int("states_every", states_every, 1)
    device = model.embedding.weight.device
    if not compiles(device):
        return Warmup(device.type, ())
    calls = [_measured(f"a prompt of {T} tokens", _prefill(model, T, states_every), device) for T in prompts]
    calls += [_measured(f"a step of {B} sequences", _steps(model, B, capacity), device) for B in batches]
    return Warmup(device.type, tuple(calls))


def compiles(device: torch.device) -> bool:
    """Return whether calls on a device compile kernels."""
    return device.type == "cuda"


def _prefill(model: LanguageModel, T: int, states_every: int | None) -> Callable[[], object]:
    """Return a call that reads a prompt of T tokens."""
    ids = torch.zeros(1, T, dtype=torch.int64, device=model.embedding.weight.device)
    if states_every is None:
        return lambda: model.logits(model.hidden(ids, return_state=True)[0][:, -1])
    return lambda: model.logits(model.prefill(ids, states_every=states_every)[0][:, -1])


def _steps(model: LanguageModel, B: int, capacity: int | None) -> Callable[[], object]:
    """Return a call that makes a decoder and one step of B sequences; the capture of its graph compiles."""
    ids = torch.zeros(B, dtype=torch.int64, device=model.embedding.weight.device)
    return lambda: Decoder(model, model.initial_state(B), capacity=capacity).step(ids)


def _measured(name: str, call: Callable[[], object], device: torch.device) -> WarmCall:
    """Make a call twice, and return the times of both and the kernels that it compiled."""
    seconds = []
    with compiled_kernels() as kernels:
        for _ in range(2):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return WarmCall(name, seconds[0], seconds[1], tuple(kernels))


@contextlib.contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Collect the names of the kernels that Triton compiles in the body of a `with` statement.

    A hook that is set already is called too. Without Triton, or with a version that has no such hook, there are none.
    """
    found: list[str] = []
    try:
        from triton import knobs

        before: Any = knobs.runtime.jit_post_compile_hook
    except (ImportError, AttributeError):
        yield found
        return

    def hook(*args: Any, **kwargs: Any) -> Any:
        """Take the name of the kernel from its description, such as ``name[num_warps: 4, ...](...)``."""
        text = kwargs.get("repr") or next((a for a in args if isinstance(a, str) and "[" in a), "")
        found.append(text.partition("[")[0])
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
