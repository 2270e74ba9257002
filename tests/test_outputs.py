"""Outputs that cannot be written are reported before anything is computed, and leave no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfla._util.errors import UserError
from tfla._util.outputs import check_file, check_folder


def test_places_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for path in (tmp_path / "new", tmp_path / "old", tmp_path / "a" / "b" / "new"):
        check_file("out", path)
    for path in (tmp_path, tmp_path / "a" / "b"):
        check_folder("out", path)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.skipif(os.name != "posix", reason="paths are POSIX")
@pytest.mark.parametrize("bad", ["/dev/null/x", "/dev/null", "/proc/nowhere/x", "x" * 300, "a\0b", "file/x"])
def test_places_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for check in (check_file, check_folder):
        with pytest.raises(UserError, match=r"^out: .* cannot be written"):
            check("out", Path(bad))
    with pytest.raises(UserError, match=r"it is a folder$"):
        check_file("out", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"Permission denied$"):
        check_file("out", tmp_path / "locked" / "new")
