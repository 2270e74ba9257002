"""A bounded cache of what was derived from the signature of a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

MAX_ENTRIES = 1024  # of one cache
Value = TypeVar("Value")


class CallCache(Generic[Value]):
    """A bounded dict from call signatures to what the caller derived from them.

    A cache that has reached MAX_ENTRIES is cleared before the next entry. :func:`clear_caches` clears all caches of
    the process.
    """

    def __init__(self) -> None:
        self.entries: dict[Hashable, Value] = {}
        ALL_CACHES.append(self)

    def get(self, signature: Hashable) -> Value | None:
        """Return the value of a signature, or None where there is none."""
        try:
            return self.entries.get(signature)
        except TypeError:  # an unhashable option, which the checks of the call will name
            return None

    def add(self, signature: Hashable, value: Value) -> None:
        """Keep the value of a signature; the signature None stands for a call that must not be cached."""
        if signature is None:
            return
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.clear()
        self.entries[signature] = value


ALL_CACHES: list[CallCache[Any]] = []


def clear_caches() -> None:
    """Clear every cache, so that the next call of each signature is checked, planned and recorded again."""
    for cache in ALL_CACHES:
        cache.entries.clear()
