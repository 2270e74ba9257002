"""Errors and notices of the command line, each one line long."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path


class UserError(Exception):
    """An error that the user can correct.

    The message is one line that names the option or the file and says what is wrong; the command line prints it in
    place of a traceback.
    """


def notice(message: str) -> None:
    """Print one line to stderr without breaking a progress bar there."""
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)


def reason(error: BaseException) -> str:
    """Return one line on why an error occurred.

    This is the message of the operating system if the error or one of its causes has one, else the error's first line.
    """
    return _of_system(error) or (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_not_written(error: BaseException, folder: Path) -> str:
    """Return one line on why files could not be written into a folder.

    PyTorch's writers hide the message of the operating system. The line then says how much room the disk has.
    """
    if _of_system(error):
        return reason(error)
    with suppress(OSError):
        return f"{reason(error)} ({shutil.disk_usage(folder).free:,} bytes are free on its disk)"
    return reason(error)


def _of_system(error: BaseException) -> str | None:
    """Return the message of the operating system of an error or one of its causes, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return None


def one_line(error: BaseException) -> str:
    """Return the whole message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def wrong_word(command: str, word: str, kind: str, usage: str) -> int:
    """Print which word of a command line is wrong and what is allowed.

    Args:
        command: the command so far, such as "tfla bench".
        word: the word that is wrong.
        kind: what the word should have been, such as "benchmark".
        usage: the help text that lists the allowed words.

    Returns:
        the exit code of the process, 2.
    """
    print(f"{command}: error: there is no {kind} {word!r}\n\n{usage}", file=sys.stderr)
    return 2
