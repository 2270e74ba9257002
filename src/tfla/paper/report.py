"""The report: all figures and claims in one self-contained HTML file."""

from __future__ import annotations

import base64
import re
import sys
import time
from html import escape
from pathlib import Path
from typing import NamedTuple

from tfla._util.files import write_atomically
from tfla.paper.report_types import Claim, Figure, Missing, Options, Table
from tfla.paper.sections import SECTIONS

NAME = "report.html"
MIME = {".png": "image/png", ".svg": "image/svg+xml", ".csv": "text/csv"}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tfla: the paper's analyses</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem }}
h2 {{ margin-top: 3rem; border-bottom: 1px solid #ccc }}
figure {{ margin: 2rem 0 }}
img {{ max-width: 100%; height: auto }}
figcaption p {{ max-width: 48rem; margin: .5rem 0 }}
code {{ background: #f2f2f2; padding: 0 .2em }}
.missing {{ color: #666 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #ddd }}
td p {{ margin: 0 0 .4rem }}
</style>
</head>
<body>
<h1>The paper's analyses</h1>
<p>{intro}</p>
<ul>
{contents}
</ul>
{sections}
</body>
</html>
"""
INTRO = """Figures of Tiled Flash Linear Attention, drawn from formulas, from this library's own operator and from
stored measurements, which name the machine, the date and the versions. Each figure has a caption, the command that
draws it, and its numbers."""


def text(plain: str) -> str:
    """Return plain text as HTML, with paragraphs at empty lines and code in backticks."""
    paragraphs = (escape(part.strip()) for part in plain.strip().split("\n\n"))
    marked = (re.sub(r"`([^`]+)`", r"<code>\1</code>", part) for part in paragraphs)
    return "".join(f"<p>{part}</p>" for part in marked)


def data_url(path: Path) -> str:
    """Return the content of a file as a data URL."""
    return f"data:{MIME[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def block(figure: Figure | Missing) -> str:
    """Return one figure with its caption, or the reason why it is missing."""
    head = f'<h3 id="{escape(figure.name)}">{escape(figure.title)}</h3>'
    if isinstance(figure, Missing):
        return f'{head}<div class="missing">{text("Not drawn: " + figure.why)}</div>'
    numbers = f'<a download="{escape(figure.data_path.name)}" href="{data_url(figure.data_path)}">numbers (CSV)</a>'
    return (
        f'{head}<figure><img alt="{escape(figure.title)}" src="{data_url(figure.path)}">'
        f"<figcaption>{text(figure.caption)}<p><code>{escape(figure.command)}</code> · {numbers}</p></figcaption>"
        "</figure>"
    )


def table(claims: list[Claim]) -> str:
    """Return the table of claims, followed by the tables of numbers that claims have."""
    rows = "\n".join(
        f"<tr><th>{escape(c.title)}</th><td>{text(c.paper)}</td><td>{text(c.here)}<p><code>{escape(c.command)}</code></p>"
        "</td></tr>"
        for c in claims
    )
    own = "".join(numbers(c.title, c.table) for c in claims if c.table is not None)
    return f"<table>\n<tr><th></th><th>the paper</th><th>here</th></tr>\n{rows}\n</table>{own}"


def numbers(title: str, given: Table) -> str:
    """Return one table of numbers with a heading."""

    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "\n".join([line(given.header, "th"), *(line(row, "td") for row in given.rows)])
    return f"\n<h3>{escape(title)}</h3>\n<table>\n{rows}\n</table>"


class Written(NamedTuple):
    """The written report: its path, the number of its figures, and the missing ones."""

    path: Path
    drawn: int
    missing: list[Missing]


def write(config: Options) -> Written:
    """Draw all sections with these options and write the report."""
    contents, sections, everything = [], [], list[Figure | Missing]()
    for name, section in SECTIONS.items():
        began = time.monotonic()
        own = section.defaults(config)
        found = section.draw(own)
        everything += found
        drawn = sum(isinstance(f, Figure) for f in found)
        print(f"{name}: {drawn} of {len(found)} figures, {time.monotonic() - began:.0f} s", file=sys.stderr)
        links = ", ".join(f'<a href="#{escape(f.name)}">{escape(f.title)}</a>' for f in found)
        contents.append(f"<li>{escape(section.title)}: {links}</li>")
        claims = section.claims(own)
        heading = [f"<h2>{escape(section.title)}</h2>"] + ([table(claims)] if claims else [])
        sections.append("\n".join([*heading, *map(block, found)]))
    target = config.out / NAME
    config.out.mkdir(parents=True, exist_ok=True)
    page = PAGE.format(intro=escape(INTRO), contents="\n".join(contents), sections="\n".join(sections))
    write_atomically(target, lambda path: path.write_text(page, encoding="utf-8"))
    missing = [f for f in everything if isinstance(f, Missing)]
    return Written(target, len(everything) - len(missing), missing)
