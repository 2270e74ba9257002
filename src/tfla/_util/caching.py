"""A bounded cache of what was derived from the signature of a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

REMEMBERED = 1024  # calls
Found = TypeVar("Found")


class Known(Generic[Found]):
    """By what tells calls apart; None for one that is not kept."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Found] = {}
        EVERYTHING.append(self)

    def get(self, call: Hashable) -> Found | None:
        try:
            return self.found.get(call)
        except TypeError:  # an option that is none, which checks say
            return None

    def add(self, call: Hashable, found: Found) -> None:
        if call is None:
            return
        if len(self.found) >= REMEMBERED:
            self.found.clear()
        self.found[call] = found


EVERYTHING: list[Known[Any]] = []


def forget() -> None:
    """Find out anew."""
    for known in EVERYTHING:
        known.found.clear()
