"""Tables in Markdown."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, one line per row, without a final newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
