"""The check of the lengths of decoding steps inside a graph, registered as `tfla::checked_lengths`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.ops.checks import check_values_of_lengths

torch.library.define(
    "tfla::checked_lengths", "(Tensor lengths, SymInt T) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
checked_lengths = torch.ops.tfla.checked_lengths.default


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
