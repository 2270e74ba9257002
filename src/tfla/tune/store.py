"""The file of tuned entries, which calls with ``chunk_size=None`` read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError, reason
from tfla._util.files import write_atomically
from tfla.ops import tuned
from tfla.ops.tuned import VERSION, Entry


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of a file, and why it cannot be used, or None; a missing file has no rows."""
    if not path.exists():
        return [], None
    try:
        text = path.read_text(encoding="utf-8")
        tuned.parse(text)
        rows: list[dict[str, Any]] = json.loads(text)["entries"]
    except (OSError, ValueError) as error:
        return [], reason(error)
    return rows, None


def entry(row: dict[str, Any]) -> Entry:
    """Return the entry of a row."""
    return Entry(**{name: row[name] for name in Entry._fields})


def add(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to the file, in place of rows with the same key; the file is replaced atomically.

    Raises:
        UserError: the file cannot be written.
    """
    new = {entry(row).key for row in rows}
    kept = [row for row in read(path)[0] if entry(row).key not in new]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in [*kept, *rows])
    text = f'{{\n "version": {VERSION},\n "entries": [\n{lines}\n ]\n}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {reason(error)}") from error
    tuned.clear_entries()
