"""The part of one process: what forward and backward share, and the form in which a backend gets it.

Names of dimensions: B rows of the batch, F fragments (:mod:`.cuts`) and S spans of this process, D packed sequences (1
in a dense batch). States of the batch or of packed sequences are (B D, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.backends.base import Spec
from tfla.backends.delta import DeltaSpec
from tfla.ops.context_parallel.cuts import Cut, Placement
from tfla.ops.gates import clamp, log_gates


class Call(NamedTuple):
    """The options of a forward and its backward, and this process's part of the sequences."""

    cut: Cut
    placement: Placement
    group: str  # the name of the process group
    backend: str
    spec: Spec  # `final_state`: of the whole sequences
    fragments: int | None  # F of packed tensors, the missing ones without a step; None: as many as there are


class DeltaCall(NamedTuple):
    """The same of a call of the delta rule."""

    cut: Cut
    placement: Placement
    group: str
    backend: str
    spec: DeltaSpec
    fragments: int | None


class Saved(NamedTuple):
    """The tensors that the backward needs besides inputs and outputs; parts that do not exist have shape (0,)."""

    d: Tensor  # denominators and states at chunk starts, as the backend leaves them
    chunk_C: Tensor
    chunk_n: Tensor
    C: Tensor  # (S, B, H, dqk, dhv), the states before this process's spans; zero where a sequence begins
    n: Tensor  # (S, B, H, dqk)
    m: Tensor  # (S, B, H)
    last_m: Tensor  # (B, F, H), the max states after the fragments
    log_decay: Tensor  # (all spans, B, H), float64, of the last fragment of each span
    end_log_decay: Tensor  # (D, B, H), float64, of the fragments that end; with `final_state`


class Results(NamedTuple):
    """The results of a forward: h, the final states of all sequences, and what the backward needs."""

    h: Tensor  # (B, T, H, dhv)
    C: Tensor  # (B D, H, dqk, dhv); shape (0,) without `final_state`
    n: Tensor  # (B D, H, dqk)
    m: Tensor  # (B D, H)
    saved: Saved


class Shape(NamedTuple):
    """The form in which the backend gets the fragments of this process."""

    batch: int  # B
    offsets: tuple[int, ...] | None  # of packed fragments; None: they have equal lengths and are rows of a batch
    fragments: int

    @staticmethod
    def of(call: Call, batch: int) -> Shape:
        """Return the form for a batch: rows where fragments are equally long, else packed sequences."""
        return Shape.of_cut(call.cut, batch, call.fragments)

    @staticmethod
    def of_cut(cut: Cut, batch: int, fragments: int | None = None) -> Shape:
        """Return the form of a part; ``fragments`` as in :class:`Call`."""
        found = cut.fragments
        steps = found[0].stop - found[0].start
        if fragments is None and all(f.stop - f.start == steps for f in found):
            return Shape(batch, None, len(found))
        T, count = found[-1].stop, fragments or len(found)
        ends = [f.stop for f in found] + [T] * (count - len(found))
        return Shape(batch, (0, *(row * T + end for row in range(batch) for end in ends)), count)

    def view(self, x: Tensor) -> Tensor:
        """Return (B, T, ...) as the backend reads it."""
        if self.offsets is not None:
            return x.flatten(0, 1).unsqueeze(0)
        return x if self.fragments == 1 else x.unflatten(1, (self.fragments, -1)).flatten(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """Return a tensor of the backend as (B, T, ...)."""
        if self.offsets is not None:
            return x.squeeze(0).unflatten(0, (self.batch, -1))
        return x if self.fragments == 1 else x.unflatten(0, (self.batch, -1)).flatten(1, 2)

    def joined(self, rows: Sequence[Tensor | None]) -> Tensor | None:
        """Return states (B F, ...) from those (B, ...) of the first fragments.

        None and missing ones are zero; the result is None where all are.
        """
        some = next((row for row in rows if row is not None), None)
        if some is None:
            return None
        zero = torch.zeros_like(some)
        every = [zero if row is None else row for row in (*rows, *[None] * (self.fragments - len(rows)))]
        return every[0] if len(every) == 1 else torch.stack(every, 1).flatten(0, 1)


@functools.lru_cache(maxsize=64)
def on_device(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Return numbers on a device. They are copied there once, not in each layer, and not while a graph is captured."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def of_sequences(x: Tensor | None, batch: int) -> Tensor | None:
    """Return states (B D, ...) as (B, D, ...)."""
    return None if x is None else x.unflatten(0, (batch, -1))


def local_inputs(x: Inputs, shape: Shape, C: Tensor | None, n: Tensor | None, m: Tensor | None) -> Inputs:
    """Return the inputs of the backend, from the states before the fragments (B F, ...)."""
    q, k, v, log_i, log_f = (None if t is None else shape.view(t) for t in x[:5])
    offsets = None if shape.offsets is None else on_device(x.q.device, shape.offsets)
    return Inputs(q, k, v, log_i, log_f, C, n, m, offsets)  # type: ignore[arg-type]


def before_fragments(given: Tensor | None, carried: Tensor, cut: Cut, shape: Shape) -> Tensor | None:
    """Return the states before the fragments of this process, (B F, ...).

    Args:
        given: (B D, ...), the states before sequences; None is zero.
        carried: (S, B, ...), the states before this process's spans.
        cut, shape: the part of this process.
    """
    given = of_sequences(given, shape.batch)
    zero = torch.zeros_like(carried[0])
    rows: list[Tensor | None] = []
    for s, span in enumerate(cut.spans):
        for f in span.fragments:
            start = zero if given is None else given[:, f.sequence].to(zero.dtype)
            rows.append(start if f.begins else carried[s])
    return shape.joined(rows)


def initial_gradient(given: Tensor | None, grad: Tensor, final: Tensor | None, cut: Cut, shape: Shape) -> Tensor | None:
    """Return the gradient of the states before sequences, (B D, ...), in the dtype of ``grad``, or None.

    It is zero but on the process that has the first step of a sequence, or, without a step, the sequence itself.

    Args:
        given: (B D, ...), the states before sequences, or None.
        grad: (B F, ...), the gradient of the states before fragments.
        final: (D, B, ...), the cotangents of the final states; None is zero.
        cut, shape: the part of this process.
    """
    if given is None:
        return None
    rows = torch.zeros_like(given, dtype=grad.dtype).unflatten(0, (shape.batch, -1))
    of_fragments = grad.unflatten(0, (shape.batch, -1))
    for at, f in enumerate(cut.fragments):
        if f.begins:
            rows[:, f.sequence] = of_fragments[:, at]
    for f in cut.additional:
        if f.start == f.stop and final is not None:
            rows[:, f.sequence] = final[f.sequence]
    return rows.flatten(0, 1)


def starts_of(x: Inputs, call: Call, shape: Shape, saved: Saved) -> list[Tensor | None]:
    """Return the states C, n, m before the fragments of this process, (B F, ...), or None where all are zero."""
    if all(span.source is None for span in call.cut.spans) and x.C is None:
        return [None, None, None]
    return [
        None if carried.dim() == 1 else before_fragments(given, carried, call.cut, shape)  # (0,) without a normalizer
        for given, carried in zip((x.C, x.n, x.m), (saved.C, saved.n, saved.m), strict=True)
    ]


class Gated(NamedTuple):
    """The clamped log-gates of a call, (B, T, H); log_i None is 0."""

    log_i: Tensor | None
    log_f: Tensor

    @staticmethod
    def of(x: Inputs, spec: Spec) -> Gated:
        """Return the log-gates of the inputs."""
        if spec.gates == "log" or x.log_i is None:
            return Gated(None if x.log_i is None else clamp(x.log_i), clamp(x.log_f))
        return Gated(*log_gates(x.log_i, x.log_f, spec.gates))

    def at(self, steps: slice) -> Gated:
        """Return the gates of some steps."""
        return Gated(None if self.log_i is None else self.log_i[:, steps], self.log_f[:, steps])
