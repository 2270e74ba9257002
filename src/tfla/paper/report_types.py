"""What a section of `tfla analyze` is made of.

A section is a module with a dataclass ``Config`` (:class:`Options` or a subclass) and a function

    figures(config: Config) -> list[Figure | Missing]

which draws with :mod:`tfla.paper.style` and hands every picture with its numbers to :func:`write`. It may have

    claims(config: Config) -> list[Claim]

too: what the paper claims about the section beside what is counted or measured here, from the same sources.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tfla._util import outputs
from tfla._util.files import write_atomically
from tfla.bench import results as stored_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Row = Mapping[str, Any]


@dataclass
class Options:
    """Options of every section."""

    out: Path = Path("analysis")
    """Folder for the figures (PNG or SVG) and their numbers (CSV)."""
    results: Path = field(default_factory=stored_results.default_folder)
    """Folder of stored measurements."""
    format: Literal["png", "svg"] = "png"
    """Of the figures."""

    def check(self) -> None:
        """Raise UserError where an option does not fit, the folder cannot be written to, or there are no results."""
        outputs.check_folder("out", self.out)
        stored_results.check_folder(self.results)


class Table(NamedTuple):
    """Numbers to read: a header, and rows of as many cells."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A figure that was drawn."""

    name: str
    """Of its files, and its anchor in the report."""
    title: str
    caption: str
    """What to see in it. Plain text: an empty line between paragraphs, code in backticks."""
    command: str
    """What reproduces it."""
    path: Path
    data_path: Path


@dataclass(frozen=True)
class Missing:
    """A figure that was not drawn, since a measurement is not there."""

    name: str
    title: str
    why: str
    """What is missing, and the command that measures it."""


@dataclass(frozen=True)
class Claim:
    """What the paper claims, beside what was counted or measured here. Texts may have code in backticks."""

    title: str
    paper: str
    """What it says, and where."""
    here: str
    """What was found, with numbers; what is not measured is said."""
    command: str
    """What reproduces it."""
    table: Table | None = None
    """The numbers behind the text, where they are many."""


def write(
    config: Options, name: str, drawing: Drawing, rows: Sequence[Row], *, title: str, caption: str, command: str
) -> Figure:
    """Writes ``name.png`` (or ``.svg``) and the numbers behind it as ``name.csv`` into the folder of the options.

    Args:
        rows: one mapping of column to value for each point; columns are those of all rows.

    Raises:
        ValueError: there are no numbers.
    """
    if not rows:
        raise ValueError(f"rows: got none for {name}, a figure has at least one")
    config.out.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    drawing.savefig(picture, format=config.format)
    path, data_path = config.out / f"{name}.{config.format}", config.out / f"{name}.csv"
    write_atomically(path, lambda temporary: temporary.write_bytes(picture.getvalue()))
    table = StringIO(newline="")
    writer = csv.DictWriter(table, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(data_path, lambda temporary: temporary.write_text(table.getvalue(), encoding="utf-8"))
    return Figure(name, title, caption, command, path, data_path)


def stored(config: Options, name: str) -> Any | None:
    """Read the stored result ``name.json``, whose kind is ``name``; None where there is none.

    Raises:
        UserError: the file is there but no such result.
    """
    path = config.results / f"{name}.json"
    return stored_results.read_rows(path, name) if path.exists() else None
