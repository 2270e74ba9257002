"""Checks of command-line options.

Each check raises a UserError that names the option, what was given and what is allowed.
"""

from __future__ import annotations

import math
import os
from typing import Any

from tfla._util.errors import UserError

MAX_INT = 2**63 - 1  # the largest integer of torch and NumPy


def require(ok: bool, name: str, given: object, expected: str) -> None:
    """Raise a UserError unless ``ok``.

    Args:
        ok: whether the value is allowed.
        name: the option, as the command line spells it after the dashes, with underscores.
        given: the value.
        expected: what is allowed; the message places it after the word "expected".

    Raises:
        UserError: the value is not allowed.
    """
    if not ok:
        raise UserError(f"{name}: got {given!r}, expected {expected}")


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> None:
    """Raise UserError unless ``value`` is an int from ``least`` to ``most``."""
    ok = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    require(ok, name, value, f"a whole number from {least} to {most}" if most < MAX_INT else f"at least {least}")


def check_range(
    name: str, value: Any, low: float, high: float = math.inf, *, with_low: bool = True, with_high: bool = True
) -> None:
    """Raise UserError unless ``value`` is a finite number from ``low`` to ``high``.

    Args:
        name: the option.
        value: what was given.
        low: the lower bound.
        high: the upper bound; infinity means that there is none.
        with_low: whether ``low`` itself is allowed.
        with_high: whether ``high`` itself is allowed.
    """
    ok = is_number(value) and low <= value <= high and (with_low or value != low) and (with_high or value != high)
    if high == math.inf:
        expected = f"a finite number of at least {low:g}" if with_low else f"a finite number above {low:g}"
    else:
        expected = f"a number {'from' if with_low else 'above'} {low:g} {'to' if with_high else 'and below'} {high:g}"
    require(ok, name, value, expected)


def check_threads(threads: int | None) -> None:
    """Raise UserError unless ``threads`` is None or a number of CPU threads that this machine can start."""
    if threads is not None:
        check_count("threads", threads, 1, max(64, 4 * (os.cpu_count() or 1)))
