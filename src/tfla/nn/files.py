"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace path by what ``write`` puts into a temporary file beside it, once that is on the disk.

    A crash at any moment leaves the old file or the new one. If ``write`` fails, the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask gives; a writer may swap in a file that is private
        write(temporary)
        temporary.chmod(mode)
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself is on the disk once the directory is
        _sync(path.parent)


def _sync(path: Path) -> None:
    # Windows flushes only what is open for writing; a directory opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
