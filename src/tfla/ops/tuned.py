"""The table of kernels and chunk sizes that `tfla tune` found, for calls that leave the choice open.

It is read once a process from two JSON files of the same form: the user's, which comes first, and one that is part of
the library and has the paper's shapes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from tfla._util import caching
from tfla.backends import BACKENDS, Inputs
from tfla.backends.gpu.runtime import constant

SHIPPED = Path(__file__).with_name("chunk_sizes.json")
VERSION = 1


class Entry(NamedTuple):
    """The fastest kernel and chunk size for forward and backward of one shape on one device, within a memory limit."""

    device: str  # as `device_name` returns it
    backend: str
    dtype: str
    normalize: bool
    B: int
    T: int
    H: int
    dqk: int
    dhv: int
    kernel: str
    chunk_size: int
    asked: bool  # tuned for this kernel alone: does not apply to calls that leave the kernel open

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify an entry: the table has one entry per key."""
        return (*self[:9], self.kernel if self.asked else None)


def user_file() -> Path:
    """Return the path of the user's file: in $TFLA_CACHE_DIR, else in the system's folder for caches."""
    if given := os.environ.get("TFLA_CACHE_DIR"):
        return Path(given) / SHIPPED.name
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tfla" / SHIPPED.name


def parse(text: str) -> list[Entry]:
    """Return the entries of a file's text.

    Raises:
        ValueError: the text has another form; the message says what is wrong.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"expected a JSON object with version {VERSION}")
    rows = found.get("entries")
    if not isinstance(rows, list):
        raise ValueError("expected a list of entries")
    return [_entry(row) for row in rows]


def _entry(row: Any) -> Entry:
    """Check one object of a file and return it as an entry.

    Raises:
        ValueError: a field is missing or has another type.
    """
    kinds = get_type_hints(Entry)
    if not isinstance(row, dict):
        raise ValueError(f"an entry is {type(row).__name__}, expected an object")
    for name, kind in kinds.items():
        if name not in row or type(row[name]) is not kind:
            raise ValueError(f"{name} of an entry: got {row.get(name)!r}, expected {kind.__name__}")
    if row["chunk_size"] < 1:
        raise ValueError(f"chunk_size of an entry: got {row['chunk_size']}, expected at least 1")
    return Entry(**{name: row[name] for name in kinds})


@functools.cache
def load() -> tuple[Entry, ...]:
    """Return the user's entries, then the library's, one a key.

    A file that cannot be read, and an entry of an unknown backend or kernel, is skipped with a warning.
    """
    found: dict[tuple[Any, ...], Entry] = {}
    for path in (user_file(), SHIPPED):
        try:
            entries = parse(path.read_text(encoding="utf-8")) if path.exists() else []
        except (OSError, ValueError) as error:
            warnings.warn(f"tfla: {path} is left out: {error}; `tfla tune` writes a new one", stacklevel=2)
            continue
        for entry in entries:
            if (why := _unknown(entry)) is not None:
                warnings.warn(
                    f"tfla: an entry of {path} is left out: {why}; `tfla tune` writes a new one", stacklevel=2
                )
                continue
            found.setdefault(entry.key, entry)
    return tuple(found.values())


def _unknown(entry: Entry) -> str | None:
    """Return which name of an entry this version of the library does not have, or None where it has both."""
    if entry.backend not in BACKENDS:
        return f"backend: got {entry.backend!r}, allowed are {', '.join(map(repr, BACKENDS))}"
    kernels = BACKENDS[entry.backend].kernels
    if entry.kernel not in kernels:
        return f"kernel: got {entry.kernel!r}, backend {entry.backend!r} has {', '.join(map(repr, kernels))}"
    return None


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of a GPU, the model of a CPU, or else the type of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else device.type


def cpu_name() -> str:
    """Return the model of this machine's CPU, or its architecture where the system does not tell the model."""
    import platform

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@constant
def entries(device: torch.device, backend: str, dtype: torch.dtype, normalize: bool) -> tuple[Entry, ...]:
    """Return the entries for this device, backend, dtype and normalizer; a constant for torch.compile."""
    return _entries(device, backend, dtype, normalize)


@functools.cache
def _entries(device: torch.device, backend: str, dtype: torch.dtype, normalize: bool) -> tuple[Entry, ...]:
    kind = str(dtype).removeprefix("torch.")
    found = [e for e in load() if (e.backend, e.dtype, e.normalize) == (backend, kind, normalize)]
    name = device_name(device) if found else ""
    return tuple(e for e in found if e.device == name)


def find(x: Inputs, backend: str, kernel: str | None, normalize: bool) -> Entry | None:
    """Return the entry for exactly this shape; None if there is none or a compiled graph has dynamic shapes."""
    return among(entries(x.q.device, backend, x.q.dtype, normalize), x, kernel)


def among(entries: Sequence[Entry], x: Inputs, kernel: str | None) -> Entry | None:
    """Return the entry for exactly this shape among those of its device, backend and dtype; see :func:`find`."""
    if not entries or x.cu_seqlens is not None or x.q.shape[2] != x.v.shape[2]:
        return None
    (B, T, H, dhv), dqk = x.v.shape, x.q.shape[3]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if not (has_static_value(B) and has_static_value(T) and has_static_value(H)):
            return None
    for e in entries:
        same = e.T == T and e.B == B and e.H == H and e.dqk == dqk and e.dhv == dhv
        wanted = e.kernel == kernel or (kernel is None and not e.asked)
        if same and wanted and BACKENDS[e.backend].kernel_unsupported(x, e.kernel) is None:
            return e
    return None


def clear_entries() -> None:
    """Clear the table, so that the next call reads the files; compiled graphs keep their choices."""
    load.cache_clear()
    _entries.cache_clear()
    caching.clear_caches()
