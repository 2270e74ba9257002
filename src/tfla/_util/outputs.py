"""Checks that the output files of a command can be written, made before the command computes anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tfla._util.errors import UserError, reason


def check_file(name: str, path: Path) -> None:
    """Raise UserError unless a file can be written at ``path``. Nothing is left there.

    Args:
        name: the name of the option in the message.
        path: the file, which may exist; its parent folders need not exist.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder" if path.is_dir() else "it is no regular file")
        _check_place(path if "\0" in path.name else path.parent)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path} cannot be written: {reason(error)}") from error


def check_folder(name: str, path: Path) -> None:
    """Raise UserError unless files can be written into a folder, which need not exist. Nothing is left there."""
    try:
        _check_place(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path} cannot be written to: {reason(error)}") from error


def _check_place(folder: Path) -> None:
    """Create a temporary file in a folder or its nearest existing parent, since permission bits do not tell."""
    if "\0" in str(folder):
        raise ValueError("it has a null character")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass
