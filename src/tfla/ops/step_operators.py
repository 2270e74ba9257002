"""The operators of decoding steps, registered with PyTorch.

    tfla::steps             a few steps
    tfla::steps_            the same; it overwrites the state C in place
    tfla::checked_lengths   the check of the lengths of decoding steps inside a graph

They have neither gradients nor rules for transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, StepInputs
from tfla.backends.base import StepSpec
from tfla.ops import flops
from tfla.ops.checks import check_values_of_lengths
from tfla.ops.schema import Schema

SCHEMA = Schema(StepInputs, StepSpec, backend_before="final_state", results=4)
SCHEMA_IN_PLACE = Schema(
    StepInputs, StepSpec, backend_before="eps", results=3, fixed={"final_state": True}, overwritten=("C",)
)
torch.library.define("tfla::steps", SCHEMA.text)
torch.library.define("tfla::steps_", SCHEMA_IN_PLACE.text)
torch.library.define(
    "tfla::checked_lengths", "(Tensor lengths, SymInt T) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
steps, steps_ = torch.ops.tfla.steps.default, torch.ops.tfla.steps_.default
checked_lengths = torch.ops.tfla.checked_lengths.default
flops.add(torch.ops.tfla.steps, SCHEMA, flops.steps_flops)
flops.add(torch.ops.tfla.steps_, SCHEMA_IN_PLACE, flops.steps_flops)


def _run(schema: Schema[StepInputs, StepSpec], args: Sequence[Any], in_place: bool) -> tuple[Tensor, ...]:
    """Run the steps on the backend that the arguments name, and return h, C, n and m as distinct tensors."""
    x, _, backend, spec = schema.unpack(args)
    if x.lengths is not None and x.lengths.device.type == "cpu":  # a call that is traced cannot read them
        check_values_of_lengths(x.lengths, x.v.shape[1])
    h, *state = BACKENDS[backend].steps(x, spec, x.C if in_place else None)
    return h, *(t if t.numel() else torch.empty_like(t) for t in state)


@torch.library.impl("tfla::steps", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    return _run(SCHEMA, args, in_place=False)


@torch.library.impl("tfla::steps_", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    h, _, n, m = _run(SCHEMA_IN_PLACE, args, in_place=True)
    return h, n, m


@torch.library.register_fake("tfla::steps")
def _(*args: Any) -> tuple[Tensor, ...]:
    x, _, _, spec = SCHEMA.unpack(args)
    h, n, m = _shapes(x)
    if not spec.final_state:
        return h, *(x.q.new_empty(0) for _ in range(3))
    return h, x.q.new_empty(x.C.shape, dtype=x.kept_dtype(x.C)), n, m


@torch.library.register_fake("tfla::steps_")
def _(*args: Any) -> tuple[Tensor, ...]:
    return _shapes(SCHEMA_IN_PLACE.unpack(args).x)


def _shapes(x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes and dtypes of h and of the new n and m."""
    n = x.q.new_empty(0) if x.n is None else x.q.new_empty(x.n.shape, dtype=x.kept_dtype(x.n))
    m = x.q.new_empty(0) if x.m is None else x.q.new_empty(x.m.shape, dtype=x.acc_dtype)
    return x.v.new_empty(x.v.shape), n, m


@torch.library.impl("tfla::checked_lengths", "default")
@torch._disable_dynamo
def _(lengths: Tensor, T: int) -> Tensor:
    """Check the values of lengths and return a copy: a traced call puts this check into its graph."""
    check_values_of_lengths(lengths, T)
    return lengths.clone()


@torch.library.register_fake("tfla::checked_lengths")
def _(lengths: Tensor, T: int) -> Tensor:
    return torch.empty_like(lengths)


@torch.library.register_vmap("tfla::checked_lengths")
@torch._disable_dynamo
def _(info: Any, in_dims: Sequence[int | None], lengths: Tensor, T: int) -> tuple[Tensor, int | None]:
    return checked_lengths(lengths, T), in_dims[0]
