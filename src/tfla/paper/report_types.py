"""The options and results that the sections of `tfla analyze` share: figures, tables and claims.

A section is a module with a dataclass ``Config`` (:class:`Options` or a subclass) and a function

    figures(config: Config) -> list[Figure | Missing]

which draws with :mod:`tfla.paper.style` and writes each picture with its numbers by :func:`write`. A module can also
have a function

    claims(config: Config) -> list[Claim]

with the claims of the paper about this section and what was counted or measured here
(:mod:`tfla.paper.claims_template`).
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
    """The options that all sections share."""

    out: Path = Path("analysis")
    """Folder for the figures (PNG or SVG) and their numbers (CSV)."""
    results: Path = field(default_factory=stored_results.default_folder)
    """Folder of stored measurements."""
    format: Literal["png", "svg"] = "png"
    """The file format of the figures."""

    def check(self) -> None:
        """Raise UserError where an option does not fit, the folder cannot be written to, or there are no results."""
        outputs.check_folder("out", self.out)
        stored_results.check_folder(self.results)


class Table(NamedTuple):
    """A table of texts: a header, and rows of as many cells."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A figure that was drawn."""

    name: str
    """The name of its files, and its anchor in the report."""
    title: str
    caption: str
    """What the figure shows, as plain text with empty lines between paragraphs and code in backticks."""
    command: str
    """The command that reproduces it."""
    path: Path
    data_path: Path


@dataclass(frozen=True)
class Missing:
    """A figure that was not drawn, because a measurement is missing."""

    name: str
    title: str
    why: str
    """What is missing, and the command that measures it."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper beside what was counted or measured here. Texts can have code in backticks."""

    title: str
    paper: str
    """The paper's claim, and where it stands."""
    here: str
    """What was found, with numbers, or that it was not measured."""
    command: str
    """The command that reproduces it."""
    table: Table | None = None
    """A table of numbers that follows the text."""


def write(
    config: Options, name: str, drawing: Drawing, rows: Sequence[Row], *, title: str, caption: str, command: str
) -> Figure:
    """Write ``name.png`` (or ``.svg``) and its numbers as ``name.csv`` into the folder of the options.

    Args:
        config: the options.
        name: the name of the files.
        drawing: the picture.
        rows: one mapping of column to value for each point; the columns are those of all rows.
        title: the title of the figure.
        caption: what the figure shows.
        command: the command that reproduces the figure.

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
    return Figure(name=name, title=title, caption=caption, command=command, path=path, data_path=data_path)


def stored(config: Options, name: str) -> Any | None:
    """Return the stored result ``name.json``, whose kind is ``name``; None where there is none.

    Raises:
        UserError: the file is not such a result.
    """
    path = config.results / f"{name}.json"
    return stored_results.read_rows(path, name) if path.exists() else None
