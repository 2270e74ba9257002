"""The keyword arguments that are not in the signatures, but that callers of flash-linear-attention may pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tfla.integrations.arguments import check_flags, reject_unknown

IGNORED = ("chunk_size", "head_first")


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check the ``**kwargs`` of `function`.

    Only `chunk_size` (a power of 2, or None) and `head_first=False` are allowed. They have no effect.

    Raises:
        TypeError: an argument is unknown; the message names it and those that are allowed.
        ValueError: `chunk_size` is not a power of 2, or `head_first` is True.
    """
    if not options:
        return
    reject_unknown(function, options, IGNORED)
    check_flags(head_first=options.get("head_first"))
    if options.get("head_first"):
        raise ValueError("head_first: got True, expected time before heads: (B, T, H, K)")
    size = options.get("chunk_size")
    if size is not None and (not isinstance(size, int) or size < 1 or size & (size - 1)):
        raise ValueError(f"chunk_size: got {size!r}, expected a power of 2 or None")


def read_state_layout(options: dict[str, Any], state_v_first: bool) -> bool:
    """Return whether states are (N, H, V, K), which the argument has under its present or its deprecated name.

    `transpose_state_layout`, the deprecated name of `state_v_first`, is removed from `options`.

    Raises:
        TypeError: the value is not a flag.
        ValueError: both names are given.
    """
    if "transpose_state_layout" not in options:
        return state_v_first
    check_flags(state_v_first=state_v_first)
    if state_v_first:
        raise ValueError("transpose_state_layout: got it beside state_v_first, expected state_v_first alone")
    if not torch.compiler.is_compiling():  # a warning is a graph break
        warnings.warn(
            "transpose_state_layout is deprecated; the argument is called state_v_first.",
            DeprecationWarning,
            stacklevel=3,
        )
    state_v_first = options.pop("transpose_state_layout")
    check_flags(transpose_state_layout=state_v_first)
    return state_v_first


def require_tensors(**given: object) -> None:
    """Raise a TypeError for an argument that is None although the package has no default for it.

    Raises:
        TypeError: the message names the argument.
    """
    for name, value in given.items():
        if value is None:
            raise TypeError(f"{name}: got NoneType, expected a tensor")


def refuse(**given: object) -> None:
    """Raise a ValueError for an argument of the package that is not supported, unless it is None or False.

    Raises:
        ValueError: the message names the argument and what is allowed.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name}: got {got}, which tfla does not support, expected None or False")
