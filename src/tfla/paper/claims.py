"""The page that `tfla analyze claims` writes: what the paper claims and what was found here, as Markdown."""

from __future__ import annotations

from pathlib import Path

from tfla._util.files import write_atomically
from tfla._util.markdown import table
from tfla.paper.claims_template import introduction
from tfla.paper.report_types import Claim, Options
from tfla.paper.sections import SECTIONS

NAME = "claims.md"


def _markdown(claim: Claim) -> str:
    """Return one claim as Markdown."""
    parts = [f"### {claim.title}", f"**Paper.** {claim.paper}", f"**Here.** {claim.here}"]
    if claim.table is not None:
        parts.append(table(claim.table.header, claim.table.rows))
    return "\n\n".join([*parts, f"Reproduce: `{claim.command}`"])


def write(config: Options) -> Path:
    """Write the page `claims.md` into the folder of the options, and return its path."""
    parts = [introduction()]
    for section in SECTIONS.values():
        claims = section.claims(section.defaults(config))
        if claims:
            parts += [f"## {section.title}", *map(_markdown, claims)]
    target = config.out / NAME
    config.out.mkdir(parents=True, exist_ok=True)
    page = "\n\n".join(parts) + "\n"
    write_atomically(target, lambda path: path.write_text(page, encoding="utf-8"))
    return target
