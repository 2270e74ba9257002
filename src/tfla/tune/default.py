"""The kernel and chunk size that the operator chooses by itself, without the entries of `tfla tune`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from tfla._util.errors import UserError
from tfla.backends import BACKENDS, Backend, Inputs
from tfla.measure.problem import Problem
from tfla.ops import tuned
from tfla.ops.dispatch import choose
from tfla.ops.tuned import SHIPPED, Entry, device_name

# Multiprocessors, from data sheets, and compute capabilities of accelerators that this machine need not have.
PROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "B200": 148}
CAPABILITIES = {"V100": (7, 0), "A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}
FIRST_ABSENT = 64  # index of a device that no machine has, so that caches by device do not mix it with a real one


@functools.cache
def _shipped() -> tuple[Entry, ...]:
    """Return the entries that are part of the library."""
    return tuple(tuned.parse(SHIPPED.read_text(encoding="utf-8")))


def _found(x: Inputs, backend: str, kernel: str | None, normalize: bool) -> Entry | None:
    """Return the entry for a shape in the table that is part of the library, ignoring the user's file."""
    dtype, device = str(x.q.dtype).removeprefix("torch."), device_name(x.q.device)
    entries = [
        e for e in _shipped() if (e.device, e.backend, e.dtype, e.normalize) == (device, backend, dtype, normalize)
    ]
    return tuned.among(entries, x, kernel)


@contextmanager
def _absent(accelerator: str) -> Iterator[None]:
    """Let the choice of a kernel see GPUs of that kind inside this context."""
    name = f"NVIDIA {accelerator}"
    properties = SimpleNamespace(multi_processor_count=PROCESSORS[accelerator], name=name)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITIES[accelerator]),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_name", return_value=name),
    ):
        yield


def inputs(p: Problem) -> Inputs:
    """Return inputs of a shape, by which backends choose; under FakeTensorMode they take no memory."""
    dtype = getattr(torch, p.dtype)
    q, v = (torch.empty(p.B, p.T, p.H, d, dtype=dtype, device=p.device) for d in (p.dqk, p.dhv))
    gate = torch.empty(p.B, p.T, p.H, device=p.device)
    return Inputs(q, q, v, gate, gate, None, None, None, None)


def untuned(
    p: Problem, normalize: bool, backend: str | None, kernel: str | None, accelerator: str | None
) -> tuple[Backend, str, int]:
    """Return the backend, kernel and chunk size that a call takes without tuning.

    Args:
        p: the shape.
        normalize: whether the form has a normalizer.
        backend, kernel: as given to the call; None leaves the choice open.
        accelerator: a GPU that this machine need not have, in place of the problem's device.

    Raises:
        UserError: the backend or the kernel that is named cannot be used.
    """
    if accelerator is not None:
        if importlib.util.find_spec("triton") is None:
            return _without_triton(p, backend, kernel, accelerator)
        p = Problem(
            p.B, p.T, p.H, p.dqk, p.dhv, None, p.dtype, f"cuda:{FIRST_ABSENT + list(PROCESSORS).index(accelerator)}"
        )
    with nullcontext() if accelerator is None else _absent(accelerator), FakeTensorMode():
        x = inputs(p)
        try:
            chosen, kernel, chunk_size = choose(x, normalize, backend, kernel, None, _found)
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        return chosen, kernel, min(chunk_size, p.T)


def _without_triton(p: Problem, backend: str | None, kernel: str | None, accelerator: str) -> tuple[Backend, str, int]:
    """Return a guess of the choice on a GPU, where the modules that make the choice cannot be imported."""
    name = backend or "triton"
    if name not in BACKENDS:
        raise UserError(f"backend: got {name!r}, allowed are {', '.join(map(repr, BACKENDS))}")
    chosen = BACKENDS[name]
    if kernel is not None and kernel not in chosen.kernels:
        allowed = ", ".join(map(repr, chosen.kernels))
        raise UserError(f"kernel: got {kernel!r}, backend {name!r} has {allowed}")
    return chosen, kernel or chosen.kernels[0], p.T
