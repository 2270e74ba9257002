"""The command ``tfla``. Every subcommand is a function of its arguments that is imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: module and function (arguments -> exit code), the extra that it needs, one line of help."""

    module: str
    function: str
    extra: str
    help: str


COMMANDS = {
    "train": Command("tfla.train.commands", "train", "train", "train a language model on text, or go on training it"),
    "generate": Command("tfla.train.commands", "generate", "train", "continue a prompt with a trained model"),
    "demo": Command("tfla.train.commands", "demo", "train", "train a small model on Python's own library, in minutes"),
    "experiment": Command("tfla.experiments.commands", "experiment", "train", "train the paper's experiments in small"),
    "bench": Command("tfla.bench.commands", "bench", "bench", "measure the operator on this machine"),
    "support": Command("tfla.integrations.support", "support", "triton", "print what is supported where, as Markdown"),
    "tune": Command("tfla.tune.commands", "tune", "bench", "find the fastest kernel and chunk size for a shape"),
    "analyze": Command("tfla.analysis.commands", "analyze", "analysis", "draw the paper's figures, with their numbers"),
}


def usage() -> str:
    """What ``tfla --help`` prints."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: tfla COMMAND [options]", "", *lines, "", "tfla COMMAND --help lists the options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. What the user can mend is printed as one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from tfla import __version__

        print(f"tfla {__version__}")
        return 0
    if args[0] not in COMMANDS:
        print(f"tfla: error: there is no command {args[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return _run(COMMANDS[args[0]], args[1:])


def _run(command: Command, args: Sequence[str]) -> int:
    from tfla.train.messages import UserError

    try:
        return getattr(importlib.import_module(command.module), command.function)(args)
    except UserError as error:
        print(f"tfla: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tfla":
            raise
        print(f'tfla: error: {error.name} is not installed: pip install "tfla[{command.extra}]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tfla: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
