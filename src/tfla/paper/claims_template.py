"""The hand-written page of claims, `claims_template.md`, and the insertion of numbers into it.

The page has a part for each section of `tfla analyze` and in it a part for each claim:

    ### Title
    <!-- name of the claim -->
    Paper: what the paper says, and where
    Here: what was found, with {values} in braces
    Reproduce: the command

Each line of a paragraph is a sentence or two; an indented line continues the one above it. A line is left out where one
of its values is None. A line that starts with `[value]` is left out where that value is None or False, one that starts
with `[not value]` where it is anything else. Where a claim has a value `missing`, that sentence stands in place of all
that was found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from tfla.paper.report_types import Claim, Table

PAGE = Path(__file__).with_name("claims_template.md")
CONDITION = re.compile(r"\[(not )?(\w+)\] ")
Value = str | bool | Table | None
Values = Mapping[str, Value]
"""The values of one claim by name; the value `table`, if there is one, follows the text."""


class Template(NamedTuple):
    """A claim of the page, before its values are inserted."""

    title: str
    paper: str
    here: str
    command: str


def introduction() -> str:
    """Return the page's heading and first paragraphs."""
    return PAGE.read_text(encoding="utf-8").partition("\n## ")[0].strip()


@cache
def templates() -> dict[str, Template]:
    """Read the claims of the page by name, in their order.

    Raises:
        ValueError: a claim of the page has no name, or lacks one of its paragraphs.
    """
    found = {}
    for part in re.split(r"^###? ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if not body.strip():  # the heading of a section
            continue
        name = re.match(r"<!-- (\w+) -->\n", body)
        paragraphs = dict(re.findall(r"^(Paper|Here|Reproduce): (.*?)(?:\n\n|\Z)", body, re.MULTILINE | re.DOTALL))
        if name is None or len(paragraphs) != 3:
            raise ValueError(f"{PAGE.name}: the claim {heading!r} needs a name and paragraphs Paper, Here, Reproduce")
        found[name[1]] = Template(
            heading.strip(), paragraphs["Paper"], paragraphs["Here"], paragraphs["Reproduce"].strip().strip("`")
        )
    return found


def insert(text: str, values: Values) -> str:
    """Insert values into the lines of a paragraph, and join the lines that are kept.

    Raises:
        KeyError: the paragraph has a value that is not given.
    """
    kept = []
    for line in re.sub(r"\n[ \t]+", " ", text).splitlines():
        condition = CONDITION.match(line)
        if condition is not None:
            line = line[condition.end() :]
            holds = values[condition[2]] not in (None, False)
            if holds == bool(condition[1]):
                continue
        names = [name for _, name, _, _ in Formatter().parse(line) if name]
        if all(values[name] is not None for name in names):
            kept.append(line.format_map(values))
    return " ".join(kept)


def fill(values: Mapping[str, Values]) -> list[Claim]:
    """Return the claims of these names, in the order of the page, with their values inserted.

    Raises:
        KeyError: the page has no claim of that name, or a claim has a value that is not given.
    """
    page = templates()
    unknown = [name for name in values if name not in page]
    if unknown:
        raise KeyError(f"{PAGE.name} has no claims {', '.join(unknown)}")
    claims = []
    for name, template in page.items():
        if name in values:
            own = values[name]
            missing, table = own.get("missing"), own.get("table")
            here = missing if isinstance(missing, str) else insert(template.here, own)
            claims.append(
                Claim(
                    title=template.title,
                    paper=insert(template.paper, own),
                    here=here,
                    command=template.command,
                    table=table if isinstance(table, Table) else None,
                )
            )
    return claims
