"""Tensor descriptors as kernels take them, encoded once for each address.

Triton encodes them at each launch, which takes the host longer than the rest of it. All but the address is the same in
calls of a kind, and the memory that PyTorch keeps comes back at the same addresses.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

MOST = 256  # addresses that are remembered of a kind of descriptor


class Encoded:
    """What a launcher makes of a descriptor: arguments of a kernel."""

    __slots__ = ("arguments",)

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


Remembered = dict[int, Encoded]  # by address; descriptors of a kind share one, as `remembered`


def _encode(descriptor: Any, encode: Callable[..., list[Any]], kind: Any, rest: tuple[Any, ...]) -> list[Any]:
    arguments = encode(descriptor, kind, *rest)
    if len(descriptor.remembered) >= MOST:
        descriptor.remembered.clear()
    descriptor.remembered[descriptor.base.data_ptr()] = Encoded(arguments)
    return arguments


def remembering(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton's launcher of a kernel, without encoding what it has encoded before.

    Raises:
        LookupError: the launcher is not one that encodes descriptors, in a way known here.
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
    flat = inner.globals.get("_BASE_ARGS_FORMAT_LEN")  # before Triton 3.7: the kernel's arguments come behind so many

    def launched(*args: Any) -> None:
        given = args[-1] if flat is None else args[flat:]
        found: list[Any] = []
        for n, x in enumerate(given[:others]):
            if n not in kind_of:
                found.append(x)
            elif type(x) is Encoded:
                found += x.arguments
            else:
                found += _encode(x, encode, kind_of[n], rest)
        found += given[others:]
        if flat is None:
            launcher(*args[:-1], found)
        else:
            launcher(*args[:flat], *found)

    return launched


def remember(kernel: Any) -> None:
    """Has a compiled kernel do so from now on, where Triton launches it in a way known here."""
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        kernel.run.launch = remembering(kernel.run.launch)
