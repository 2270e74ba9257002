"""The checks of arguments that the functions of other libraries take and tfla's operator does not take."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from tfla.ops import checks


def drop_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` without the keyword arguments that this one does not name.

    Models of transformers pass on everything that their callers gave them.
    """
    names = frozenset(inspect.signature(function).parameters) - {"kwargs"}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in names})

    return call


def reject_unknown(function: Callable[..., Any], given: Collection[str], ignored: Collection[str]) -> None:
    """Raise a TypeError for a keyword argument that `function` neither takes nor ignores.

    Args:
        function: a public function, whose signature supplies the names in the message.
        given: the names of the arguments in its ``**kwargs``.
        ignored: the names that are accepted without effect.

    Raises:
        TypeError: a name is unknown; the message has the first such name and those that are allowed.
    """
    for name in given:
        if name not in ignored:
            named = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
            allowed = ", ".join(dict.fromkeys([*named, *ignored]))
            raise TypeError(
                f"{name}: got an argument that {function.__name__} does not take, expected one of {allowed}"
            )


def check_epsilon(name: str, value: object) -> None:
    """Raise a TypeError or ValueError where `value` is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    if not (isinstance(value, torch.SymFloat | torch.SymInt) or (math.isfinite(value) and value >= 0)):
        raise ValueError(f"{name}: got {value}, expected a finite number of at least 0")


def check_float_dtype(name: str, value: object) -> None:
    """Raise a TypeError where `value` is not a float dtype."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"{name}: got {value!r}, expected a float torch.dtype")


def check_flags(**flags: object) -> None:
    """Raise a TypeError where a flag is not True, False, or None, which stands for False."""
    checks.check_flags(**{name: flag for name, flag in flags.items() if flag is not None})
