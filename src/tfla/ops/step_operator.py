"""Steps as PyTorch knows them: registered with torch.library, traceable, without gradients.

Defined by schema: `torch.library.custom_op` adds a dispatch for autograd that takes longer than a step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, StepInputs
from tfla.backends.base import Gates, StepSpec
from tfla.ops.checks import check_values_of_lengths

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? i, Tensor f, {}, Tensor? n, Tensor? m, Tensor? lengths"
OPTIONS = "float scale, str gates, str backend"
torch.library.define("tfla::steps", f"({INPUTS.format('Tensor C')}, {OPTIONS}, bool final_state, float eps=0.0) "
                                    "-> (Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
torch.library.define(
    "tfla::steps_", f"({INPUTS.format('Tensor(a!) C')}, {OPTIONS}, float eps=0.0) -> (Tensor, Tensor, Tensor)"
)
steps, steps_ = torch.ops.tfla.steps.default, torch.ops.tfla.steps_.default

torch.library.define(
    "tfla::checked_lengths", "(Tensor lengths, SymInt T) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
checked_lengths = torch.ops.tfla.checked_lengths.default


@torch.library.impl("tfla::checked_lengths", "default")
@torch._disable_dynamo
def _(lengths: Tensor, T: int) -> Tensor:
    """Return the lengths of steps once their values have been checked, which a traced call leaves to its graph."""
    check_values_of_lengths(lengths, T)
    return lengths.clone()


@torch.library.register_fake("tfla::checked_lengths")
def _(lengths: Tensor, T: int) -> Tensor:
    return torch.empty_like(lengths)


@torch.library.register_vmap("tfla::checked_lengths")
@torch._disable_dynamo
def _(info: Any, in_dims: Sequence[int | None], lengths: Tensor, T: int) -> tuple[Tensor, int | None]:
    return checked_lengths(lengths, T), in_dims[0]


@torch.library.impl("tfla::steps", "default")
@torch._disable_dynamo
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    final_state: bool,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_lengths(lengths, v)
    out = BACKENDS[backend].steps(
        StepInputs(q, k, v, i, f, C, n, m, lengths), StepSpec(scale, gates, final_state, eps), None
    )
    return out.h, *(t if t.numel() else torch.empty_like(t) for t in out[1:])  # type: ignore[return-value]


def _check_lengths(lengths: Tensor | None, v: Tensor) -> None:
    """Check what traced calls could not: on the CPU the values cost nothing to read."""
    if lengths is not None and lengths.device.type == "cpu":
        check_values_of_lengths(lengths, v.shape[1])


@torch.library.register_fake("tfla::steps")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    final_state: bool,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = StepInputs(q, k, v, i, f, C, n, m, lengths)

    def new(like: Tensor | None, dtype: torch.dtype) -> Tensor:
        return q.new_empty((0,) if like is None or not final_state else like.shape, dtype=dtype)

    new_n = new(n, q.dtype if n is None or not final_state else x.kept_dtype(n))
    new_C = new(C, x.kept_dtype(C) if final_state else q.dtype)
    return v.new_empty(v.shape), new_C, new_n, new(m, x.acc_dtype if n is not None and final_state else q.dtype)


@torch.library.impl("tfla::steps_", "default")
@torch._disable_dynamo
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_lengths(lengths, v)
    out = BACKENDS[backend].steps(StepInputs(q, k, v, i, f, C, n, m, lengths), StepSpec(scale, gates, True, eps), C)
    return out.h, *(t if t.numel() else torch.empty_like(t) for t in out[2:])  # type: ignore[return-value]


@torch.library.register_fake("tfla::steps_")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    x = StepInputs(q, k, v, i, f, C, n, m, lengths)
    new_n = q.new_empty(0) if n is None else q.new_empty(n.shape, dtype=x.kept_dtype(n))
    new_m = q.new_empty(0) if m is None else q.new_empty(m.shape, dtype=x.acc_dtype)
    return v.new_empty(v.shape), new_n, new_m
