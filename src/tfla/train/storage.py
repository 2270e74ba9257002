"""Folders that are either whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":  # other systems do not open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A temporary folder beside target that becomes target at the end, once all in it is on the disk.

    A crash or an error at any moment leaves target as it was. A target that is already there is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):
            _sync(path)
        _sync(temporary)
        if target.exists():
            remove_directory(target)
        temporary.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_directory(target: Path) -> None:
    """Remove a folder so that a crash never leaves half of it under its own name."""
    doomed = target.with_name(f"{TEMPORARY}removed-{target.name}-{os.getpid()}")
    target.rename(doomed)
    shutil.rmtree(doomed)


def clear_temporary(directory: Path) -> None:
    """Remove what a killed process left unfinished in a folder. Only for who alone writes there."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".*.tmp"):  # of write_atomically
        path.unlink(missing_ok=True)
