"""The checks of values inside a graph, registered as `tfla::checked_lengths` and `tfla::checked_indices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.ops.checks import check_values_of_indices, check_values_of_lengths


def _register(name: str, arguments: str, check: Callable[[Tensor, int], None]) -> Any:
    """Register `tfla::NAME`, which checks the values of a tensor and returns a copy, for traced calls."""
    torch.library.define(f"tfla::{name}", f"({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.tfla, name).default

    @torch.library.impl(f"tfla::{name}", "default")
    @torch._disable_dynamo
    def _(x: Tensor, bound: int) -> Tensor:
        check(x, bound)
        return x.clone()

    @torch.library.register_fake(f"tfla::{name}")
    def _(x: Tensor, bound: int) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_vmap(f"tfla::{name}")
    @torch._disable_dynamo
    def _(info: Any, in_dims: Sequence[int | None], x: Tensor, bound: int) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return torch.stack([operator(each, bound) for each in x.movedim(in_dims[0], 0)]), 0  # rows differ in each call

    return operator


checked_lengths = _register("checked_lengths", "Tensor lengths, SymInt T", check_values_of_lengths)
checked_indices = _register("checked_indices", "Tensor indices, SymInt rows", check_values_of_indices)
