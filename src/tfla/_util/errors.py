"""Failures that reach a user of the command line, as one sentence."""

from __future__ import annotations

import sys

import torch

from tfla._util.device import check_device, expected_devices


def pick_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the GPU if there is one.

    Raises:
        UserError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = check_device(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    if device.type == "meta":
        raise UserError(f"device: got 'meta', whose tensors hold no numbers, expected {expected_devices()}")
    return device


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


def wrong_word(command: str, word: str, kind: str, usage: str) -> int:
    """Print which word of a command line is wrong, and what is allowed; return the exit code."""
    print(f"{command}: error: there is no {kind} {word!r}\n\n{usage}", file=sys.stderr)
    return 2
