"""Every dotted name of the library in the pages and in docstrings of src is there: `tfla.State.zeros`, for example."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?<![\w./:-])tfla(?:\.[A-Za-z_]\w*)+(?![\w/])")  # no part of a path, of a file or of torch.ops.tfla
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MISSING = object()
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|json|toml))`")  # a file in a page
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("src/**/README.md")),
)


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def places() -> dict[str, set[str]]:
    """The files that have each name."""
    found: dict[str, set[str]] = {}
    for file in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
    ):
        for text in docstrings(file) if file.suffix == ".py" else [file.read_text()]:
            for name in NAME.findall(text):
                found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


def attribute(owner: Any, name: str) -> Any:
    """The attribute, None for a field of a class that has an annotation alone, or MISSING."""
    fields: set[str] = set().union(*(vars(c).get("__annotations__", {}) for c in getattr(owner, "__mro__", ())))
    return getattr(owner, name, None if name in fields else MISSING)


def resolves(name: str) -> bool:
    """Return whether the name is a module, or an attribute that can be reached from one.

    Raises:
        ModuleNotFoundError: an optional library is not installed.
    """
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        inner = attribute(found, part)
        if inner is MISSING and hasattr(found, "__path__"):
            module = f"{found.__name__}.{part}"
            try:
                inner = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        if inner is MISSING:
            return False
        found = inner
    return True


def test_names_are_there() -> None:
    wrong, resolved, found = [], 0, places()
    for name, files in found.items():
        try:
            right = resolves(name)
        except ImportError as error:
            if not str(error.name).startswith("tfla"):
                continue  # an optional library is missing, or of another version
            right = False
        resolved += right
        if not right:
            wrong.append(f"{name} in {', '.join(sorted(files))}")
    assert not wrong, "\n".join(wrong)
    assert resolved > 50, f"{len(found)} names were found"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("tfla.mlstm", True), ("tfla.State.zeros", True), ("tfla.State.C", True), ("tfla.backends.base", True),
        ("tfla.backends.base.Spec.kernel", True), ("tfla.mlstm_of_old", False), ("tfla.backends.base.Spec.old", False),
        ("tfla.backends.of_old", False),
    ],
)  # fmt: skip
def test_what_a_name_is(name: str, right: bool) -> None:
    assert resolves(name) is right


@pytest.fixture(scope="module")
def files() -> set[str]:
    """The files and folders of the repository that a page can name."""
    found = {path for top in ("benchmarks", "docs", "examples", "src", "tests") for path in (ROOT / top).rglob("*")}
    return {str(path.relative_to(ROOT)) for path in (*found, *ROOT.glob("*")) if "__pycache__" not in path.parts}


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_files_that_pages_name_are_there(page: str, files: set[str]) -> None:
    ends = {f"/{name}" for name in files}
    assert [
        name for name in FILE.findall((ROOT / page).read_text()) if not any(e.endswith(f"/{name}") for e in ends)
    ] == []


def test_architecture_names_every_package() -> None:
    """The tree of layers and the tables of the page have every folder of the package with code."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = [file.parent for file in (ROOT / "src" / "tfla").glob("*/__init__.py")]
    assert [folder.name for folder in folders if not re.search(rf"\b{folder.name}\b", text)] == []


def test_every_page_is_in_the_overview() -> None:
    """docs/index.md and the navigation of the site have every page."""
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    overview, navigation = (ROOT / "docs" / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert {page for page in pages if f"({page})" not in overview} == set()
    assert {page for page in pages if not re.search(rf"[ -]{re.escape(page)}\n", navigation)} == set()
