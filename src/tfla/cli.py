"""The command ``tfla``; the function of a subcommand is imported only when the subcommand is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: its module and function (arguments -> exit code), the extra that it needs, and a line of help."""

    module: str
    function: str
    extra: str
    help: str


COMMANDS = {
    "train": Command("tfla.train.commands", "train", "train", "train a language model on text, or go on training it"),
    "generate": Command("tfla.train.commands", "generate", "train", "continue a prompt with a trained model"),
    "export": Command(
        "tfla.integrations.transformers.export", "export_command", "train", "write a trained model for transformers"
    ),
    "warmup": Command("tfla.train.warmup", "warmup", "train", "compile what a model needs before its first request"),
    "demo": Command("tfla.train.commands", "demo", "train", "train a small model on Python's own library, in minutes"),
    "experiment": Command(
        "tfla.paper.experiments.commands",
        "experiment",
        "train",
        "train small models on the tasks of experiments",
    ),
    "bench": Command("tfla.bench.commands", "bench", "bench", "measure the operator on this machine"),
    "support": Command("tfla.support_table", "support", "triton", "print what is supported where, as Markdown"),
    "tune": Command("tfla.bench.tune_command", "tune", "bench", "find the fastest kernel and chunk size for a shape"),
    "analyze": Command("tfla.paper.commands", "analyze", "analysis", "draw the paper's figures, with their numbers"),
}


def usage() -> str:
    """Return the text of ``tfla --help``."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: tfla COMMAND [options]", "", *lines, "", "tfla COMMAND --help lists the options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; an error that the user can correct is printed as one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe is caught, and not when the interpreter exits
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_output()
        return 0
    except OSError as error:  # for example a full disk at the end of a pipe, or a file that cannot be read
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print(f"tfla: error: {where}{error.strerror or error}", file=sys.stderr)
        _discard_output()
        return 1


def _dispatch(args: Sequence[str]) -> int:
    """Run the subcommand that the arguments name, or print help or the version."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from tfla import __version__

        print(f"tfla {__version__}")
        return 0
    if args[0] not in COMMANDS:
        from tfla._util.errors import wrong_word

        return wrong_word("tfla", args[0], "command", usage())
    return _run(COMMANDS[args[0]], args[1:])


def _run(command: Command, args: Sequence[str]) -> int:
    """Import and call the function of a subcommand; turn errors of the user into one line."""
    from tfla._util.errors import UserError, one_line

    try:
        return getattr(importlib.import_module(command.module), command.function)(args)
    except UserError as error:
        message = one_line(error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tfla":
            raise
        message = f'{error.name} is not installed: pip install "tfla[{command.extra}]"'
    except KeyboardInterrupt:
        print("tfla: stopped", file=sys.stderr)
        return 130
    print(f"tfla: error: {message}", file=sys.stderr)
    return 1


def _discard_output() -> None:
    """Redirect stdout to the null device, so that the interpreter does not fail when it flushes it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stdout without a file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
