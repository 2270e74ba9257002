"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfla._util.errors import reason


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


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"


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


def write_manifest(folder: Path, **values: Any) -> None:
    """Write the size and the digest of every file of a folder, and values of the caller's, into a file beside them."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir()) if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**values, "files": files}, indent=2) + "\n")


def what_is_broken(path: Path, contents: bool = True) -> str | None:
    """Compare a folder with its manifest.

    Args:
        path: the folder.
        contents: compare digests, which reads every file; False compares sizes only.

    Returns:
        None for a folder that is just as it was written, else the file that is not and why.
    """
    try:
        files = {
            name: (entry["bytes"], entry["sha256"])
            for name, entry in json.loads((path / MANIFEST).read_text())["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {reason(error)}"
    compared = (_difference(path / name, size, digest if contents else None) for name, (size, digest) in files.items())
    return next((found for found in compared if found is not None), None)


def _difference(path: Path, size: int, digest: str | None) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path.name} has {found} bytes, not {size}"
        if digest is not None and _sha256(path) != digest:
            return f"{path.name} has changed since it was written"
    except OSError as error:
        return f"{path.name} cannot be read: {reason(error)}"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
