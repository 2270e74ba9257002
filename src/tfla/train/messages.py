"""How training speaks to the person who started it."""

from __future__ import annotations

import sys


class UserError(Exception):
    """Something the user can mend; the message is one line that names what and where. The command line prints it."""


def notice(message: str) -> None:
    """Print one line to stderr without breaking a progress bar that runs there."""
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)


def reason(error: BaseException) -> str:
    """One line of why: what the operating system said, if it said anything, else the error's first line."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """Return all that an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
