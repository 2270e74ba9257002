"""Checks of keyword arguments: a function that takes ``**kwargs`` for compatibility refuses what it does not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any


def refuse_unknown(function: Callable[..., Any], given: Collection[str], ignored: Collection[str]) -> None:
    """Raise where `given` names an argument that `function` neither takes nor is documented to ignore.

    Args:
        function: the public function, whose signature supplies the names in the message.
        given: names of the arguments that arrived in its ``**kwargs``.
        ignored: names that are accepted without effect.

    Raises:
        TypeError: for the first unknown name; the message lists what is allowed.
    """
    for name in given:
        if name not in ignored:
            named = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
            allowed = ", ".join(dict.fromkeys([*named, *ignored]))
            raise TypeError(
                f"{name}: got an argument that {function.__name__} does not take, expected one of {allowed}"
            )
