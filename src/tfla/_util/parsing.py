"""The options of a command from its words; an empty path, such as that of an unset variable of a shell, is an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tfla._util.options import require

C = TypeVar("C")

EMPTY = Path("")  # compared by identity, since it equals Path("."), which is allowed


def parse(kind: type[C], args: Sequence[str], prog: str, **options: Any) -> C:
    """Return the options of a command, made from a dataclass.

    Args:
        kind: the dataclass.
        args: the words after the command.
        prog: the command.
        options: the arguments ``description`` and ``default`` of ``tyro.cli``.

    Raises:
        UserError: a path is empty.
    """
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec[Path] | None:
        """Return how a path is made from a word."""
        if info.type is not Path:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="PATH", instance_from_str=lambda words: path_option(words[0]),
            is_instance=lambda value: isinstance(value, Path), str_from_instance=lambda path: [str(path)],
        )  # fmt: skip

    with registry:
        found: C = tyro.cli(kind, args=args, prog=prog, **options)
    check_paths(found)
    return found


def path_option(text: str) -> Path:
    """Return the path that a word names; :func:`check_paths` refuses an empty one by the name of its option."""
    return Path(text) if text else EMPTY


def check_paths(config: Any, prefix: str = "") -> None:
    """Raise UserError if an option of a config, or of a dataclass inside it, is an empty word in place of a path."""
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            check_paths(value, f"{prefix}{name}.")
        empty = any(path is EMPTY for path in (value if isinstance(value, tuple) else (value,)))
        require(not empty, prefix + name, "", "a path; the current folder is '.'")
