"""The table of folder sizes in docs/architecture.md is true, and the files to read first exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(src/tfla/[\w/]+)` \| ([\d.]+) \| .* \| `([\w.]+)` \|$", re.MULTILINE)
SLACK = 0.1  # of a size


def rows() -> list[tuple[Path, float, str]]:
    """The folders of the table, their thousands of lines as it says, and the file to read first."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return [(ROOT / folder, float(size), first) for folder, size, first in ROW.findall(page)]


def test_sizes_are_those_of_today() -> None:
    wrong = {}
    for folder, size, _ in rows():
        lines = sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))
        if abs(lines / 1e3 - size) > max(SLACK * size, 0.1):
            wrong[folder.relative_to(ROOT).as_posix()] = f"the table has {size}, now it is {lines / 1e3:.1f}"
    assert not wrong


def test_every_folder_is_in_the_table() -> None:
    source = ROOT / "src" / "tfla"
    listed = {folder for folder, *_ in rows()}
    packages = {path.parent for path in source.glob("*/__init__.py")}
    backends = source / "backends"
    packages = packages - {backends} | {path.parent for path in backends.glob("*/__init__.py")}
    assert listed == packages


def test_files_to_read_first_exist() -> None:
    assert all((folder / first).is_file() for folder, _, first in rows())
