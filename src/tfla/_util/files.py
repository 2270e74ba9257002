"""Files and folders that are either complete or absent, whatever happens while they are written."""

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

TEMPORARY = ".tmp-"  # how the names of temporary folders begin
MANIFEST = "manifest.json"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside ``path``, flush it to disk and rename it to ``path``.

    A crash at any moment leaves the old file or the new one. If ``write`` raises, the old file stays.

    Args:
        path: the file to replace or create.
        write: writes the content to the temporary path that it is given.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # the umask's; `write` may replace the file by one with other permissions
        write(temporary)
        temporary.chmod(mode)
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # a rename is durable once its directory is flushed
        _sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON with a final newline, atomically; folders on the way are created.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is flushed to disk and renamed to ``target`` when the context ends without error.

    A crash or an error at any moment leaves ``target`` as it was. An existing ``target`` is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        publish_directory(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_directory(temporary: Path, target: Path) -> None:
    """Flush a folder to disk and rename it to ``target``, which is replaced if it exists."""
    for path in sorted(temporary.rglob("*"), reverse=True):
        _sync(path)
    _sync(temporary)
    if target.exists():
        remove_directory(target)
    temporary.rename(target)
    _sync(target.parent)


def remove_directory(target: Path) -> None:
    """Rename a folder, then delete it, so that a crash never leaves half of it under its own name."""
    doomed = target.with_name(f"{TEMPORARY}removed-{target.name}-{os.getpid()}")
    target.rename(doomed)
    shutil.rmtree(doomed)


def remove_temporary(directory: Path) -> None:
    """Delete the temporary files and folders of killed processes; no other process may be writing to ``directory``."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".*.tmp"):  # left by write_atomically
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    if path.is_dir() and os.name != "posix":  # other systems cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, **values: Any) -> None:
    """Write a manifest into a folder: the size and the SHA-256 digest of each of its files, and the given values."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir()) if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**values, "files": files}, indent=2) + "\n")


def verify_manifest(path: Path, contents: bool = True) -> str | None:
    """Compare the files of a folder with its manifest.

    Args:
        path: the folder.
        contents: compare digests, which reads every file; False compares only sizes.

    Returns:
        None if the files are as they were written, else the first file that is not, and why.
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
    """Return how a file differs from its entry in the manifest, or None; digest None compares only the size."""
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
    """Return the SHA-256 digest of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
