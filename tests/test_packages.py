"""The package as a whole: every folder of modules is a package, and no modules import one another in a circle."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "tfla"


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    """Yield the modules that code imports, also inside functions, apart from those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{name.name}" for name in node.names)
            yield from (name if name in modules else str(node.module) for name in names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        yield from imports(node, modules)


def graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, from the texts of all."""
    return {name: {n for n in imports(ast.parse(text), files) if n in files} - {name} for name, text in files.items()}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {module.parent for module in SOURCES.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_import_cycles() -> None:
    files = {module_name(file): file.read_text("utf-8") for file in SOURCES.rglob("*.py")}
    modules = graph(files)
    assert sum(map(len, modules.values())) > 1000
    TopologicalSorter(modules).prepare()  # raises CycleError, which names the modules


def test_cycles_are_found() -> None:
    texts = {"p": "import p.a", "p.a": "from p import b, x", "p.b": "def f():\n    from p.a import x"}
    assert graph(texts) == {"p": {"p.a"}, "p.a": {"p", "p.b"}, "p.b": {"p.a"}}
