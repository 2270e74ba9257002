"""The command `tfla analyze`, for one section, for all of them, and for the page of claims."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from tfla._util.errors import wrong_word
from tfla._util.parsing import parse
from tfla.paper.report_types import Figure, Missing, Options
from tfla.paper.sections import SECTIONS

CLAIMS = "the page claims.md: what the paper claims and what was found here"
ALL = "all sections, and one self-contained HTML report of their figures"


def usage() -> str:
    """Return the text of `tfla analyze --help`."""
    names = {name: section.help for name, section in SECTIONS.items()} | {"claims": CLAIMS, "all": ALL}
    lines = [f"  {name:<12}{text}" for name, text in names.items()]
    return "\n".join(
        ["usage: tfla analyze SECTION [options]", "", *lines, "", "tfla analyze SECTION --help lists the options."]
    )


def sentence(text: str) -> str:
    """Return a text with a capital at its start and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def analyze(args: Sequence[str]) -> int:
    """Run `tfla analyze` with these arguments; return the exit code."""
    name, rest = (args[0], list(args[1:])) if args else ("", [])
    if name in ("-h", "--help", ""):
        print(usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name not in ("all", "claims", *SECTIONS):
        return wrong_word("tfla analyze", name, "section", usage())
    if name == "all":
        from tfla.paper import report

        config = parse(Options, rest, "tfla analyze all", description=sentence(ALL))
        config.check()
        written = report.write(config)
        print(f"wrote {written.path}: {written.drawn} figures")
        return not_drawn(written.missing)
    if name == "claims":
        from tfla.paper import claims

        config = parse(Options, rest, "tfla analyze claims", description=sentence(CLAIMS))
        config.check()
        print(f"wrote {claims.write(config)}")
        return 0
    section = SECTIONS[name]
    config = parse(section.config, rest, f"tfla analyze {name}", description=sentence(section.help))
    config.check()
    found = section.draw(config)
    for figure in found:
        if isinstance(figure, Figure):
            print(f"wrote {figure.path} and {figure.data_path.name}: {figure.title}")
            for paragraph in figure.caption.split("\n\n"):
                print(textwrap.fill(" ".join(paragraph.split()), 100, initial_indent="  ", subsequent_indent="  "))
    return not_drawn([figure for figure in found if isinstance(figure, Missing)])


def not_drawn(missing: Sequence[Missing]) -> int:
    """Print which figures are missing, and why; return the exit code, a failure if there are any."""
    for figure in missing:
        print(f"not drawn: {figure.title}: {figure.why}", file=sys.stderr)
    return 1 if missing else 0
