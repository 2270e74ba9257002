"""Errors and notices of the command line, each one line long."""

from __future__ import annotations

import sys


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
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
