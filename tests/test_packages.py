"""Every folder of modules is a package, since import-linter sees no others."""

from __future__ import annotations

from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "tfla"


def test_every_folder_of_modules_is_a_package():
    folders = {module.parent for module in SOURCES.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
