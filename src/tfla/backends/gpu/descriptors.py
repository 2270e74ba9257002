"""The cache of encoded TMA descriptors, by address.

Triton encodes the TMA descriptors of a kernel at each launch, which takes the host longer than the rest of the launch.
In calls with the same signature only the address changes, and PyTorch's allocator returns the same addresses again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

MAX_ADDRESSES = 256  # of one descriptor shape; the cache is cleared when it is full


class EncodedDescriptor:
    """An encoded descriptor: the kernel arguments that Triton's launcher makes of it."""

    __slots__ = ("arguments",)

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


# By address. The descriptors that differ only in the address share one cache, their attribute `remembered`.
DescriptorCache = dict[int, EncodedDescriptor]


def _encode(descriptor: Any, encode: Callable[..., list[Any]], kind: Any, rest: tuple[Any, ...]) -> list[Any]:
    """Encode a descriptor, add it to its cache and return the kernel arguments."""
    arguments = encode(descriptor, kind, *rest)
    if len(descriptor.remembered) >= MAX_ADDRESSES:
        descriptor.remembered.clear()
    descriptor.remembered[descriptor.base.data_ptr()] = EncodedDescriptor(arguments)
    return arguments


def with_descriptor_cache(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launcher like Triton's `launch` of a kernel that takes encoded descriptors as well.

    Raises:
        LookupError: `launch` does not encode descriptors in one of the supported ways.
    """
    inner = inspect.getclosurevars(launch)
    launcher, kinds = inner.nonlocals["launcher"], inner.nonlocals["tensordesc_meta"]
    rest: tuple[Any, ...] = ()
    if "tensordesc_indices" in inner.nonlocals:  # Triton 3.6 to 3.8
        places, encode = inner.nonlocals["tensordesc_indices"], inner.globals["make_tensordesc_arg"]
    else:
        places, encode, rest = inner.nonlocals["relevant_paths"], inner.nonlocals["make_tensordesc_arg"], ((),)
    kind_of = dict(zip(sorted(places), kinds, strict=True))
    others = max(places) + 1
    flat = inner.globals.get("_BASE_ARGS_FORMAT_LEN")  # before Triton 3.7: kernel arguments follow this many others

    def launched(*args: Any) -> None:
        given = args[-1] if flat is None else args[flat:]
        found: list[Any] = []
        for n, x in enumerate(given[:others]):
            if n not in kind_of:
                found.append(x)
            elif type(x) is EncodedDescriptor:
                found += x.arguments
            else:
                found += _encode(x, encode, kind_of[n], rest)
        found += given[others:]
        if flat is None:
            launcher(*args[:-1], found)
        else:
            launcher(*args[:flat], *found)

    return launched


def cache_descriptors(kernel: Any) -> None:
    """Replace the launcher of a compiled kernel by one that caches descriptors, if it is of a supported kind."""
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        kernel.run.launch = with_descriptor_cache(kernel.run.launch)
