"""The check that what a command will write can be written, before it computes anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tfla._util.errors import UserError, reason


def check_file(name: str, path: Path) -> None:
    """Raise UserError unless a file can be written at that path; nothing is left there.

    Args:
        name: of the option, for the message.
        path: of the file, which may be there already; folders above it need not be.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder" if path.is_dir() else "it is no regular file")
        _check_place(path if "\0" in path.name else path.parent)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path} cannot be written: {reason(error)}") from error


def check_folder(name: str, path: Path) -> None:
    """Raise UserError unless files can be written into that folder, which need not be there; nothing is left."""
    try:
        _check_place(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path} cannot be written to: {reason(error)}") from error


def _check_place(folder: Path) -> None:
    """Try a temporary file in the folder, or in the first folder above it that there is: rights alone do not tell."""
    if "\0" in str(folder):
        raise ValueError("it has a null character")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass
