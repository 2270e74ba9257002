"""Docstrings of the package are sentences with a subject, in the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import tfla

SOURCES = Path(tfla.__file__).parent
TESTS = Path(__file__).parent
# A docstring that begins so has the name above it for a subject, or none.
FRAGMENT = re.compile(
    r"^(Of|That|Those|Which|As|What|Where|By|To|In|From|Whether|With|For|Behind|And|Is|Its|It|Like|At|On|Who)\b"
)
# Earlier names. The terms are implementation, candidate, baseline, worker pool, work tile; warps have names of tasks.
OLD_NAMES = re.compile(r"^(ways?|contenders?|crew|anew|heard|gaters?|carriers?|clearers?)$", re.IGNORECASE)
# Earlier names in the package, where a name says what it stands for in its function.
OLD_NAMES_OF_PACKAGE = re.compile(r"^(mine|seen|known|pieces?|walks?|lean|narrow)$", re.IGNORECASE)
# Earlier names in backends, which had a vocabulary of their own. The field's terms are scan, segment, PipelineState,
# small head, fragment ids, causal mask, checkpoints, replay, launch hooks, TMA descriptor, REVERSE and others.
OLD_NAMES_OF_BACKENDS = re.compile(
    r"^(walks?|Walk|pieces?|slots?|slot0|mine|seen|marks|known|Known|Tape|Program|Bound|Encoded|Remembered|Outer|Source"
    r"|HopperCall|NarrowCall|narrow|lean|contender|LATER|MADE|BACK|FINAL|PACKED|SEGMENTED|DIVIDES|ADDS|SKIP|BOTH_WALKS"
    r"|mark_dots|find_delta|rows_of_n|filled_up|cut_off|next_stage|last_stage|forget|observed|(put|leave|boundary)_\w+)$"
)
OTHER_LIBRARIES = {"walk", "narrow"}  # names of theirs, which stand after a dot
BANNED = re.compile(r"\b(anew|nobody|somebody|gaters?|clearers?|carriers?|homemade)\b", re.IGNORECASE)


def docstrings(folder: Path = SOURCES) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of a folder, by default the package."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(folder)}:{line} {text.splitlines()[0]}", text


def test_docstrings_are_not_fragments() -> None:
    found = list(docstrings())
    assert len(found) > 1000
    assert [place for place, text in found if FRAGMENT.match(text)] == []


def test_docstrings_of_tests_are_not_fragments() -> None:
    """Check the modules of all tests, and all functions and classes of the simulator of kernels."""
    modules = {path: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in TESTS.rglob("*.py")}
    assert [path for path, text in modules.items() if FRAGMENT.match(text)] == []
    assert [place for place, text in docstrings(TESTS / "gluon_simulator") if FRAGMENT.match(text)] == []


def test_docstrings_use_words_of_the_field() -> None:
    assert [place for place, text in docstrings() if BANNED.search(text)] == []


def names(files: Iterable[Path], pattern: re.Pattern[str]) -> list[str]:
    """Return the places of names that match a pattern."""
    found = []
    for path in sorted(files):
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            theirs = before == "." and token.string in OTHER_LIBRARIES
            if token.type == tokenize.NAME and pattern.match(token.string) and not theirs:
                found.append(f"{path}:{token.start[0]}: {token.string}")
            before = token.string
    return found


def test_names_are_words_of_the_field() -> None:
    assert names([*SOURCES.rglob("*.py"), *TESTS.rglob("*.py")], OLD_NAMES) == []
    assert names(SOURCES.rglob("*.py"), OLD_NAMES_OF_PACKAGE) == []


def test_names_of_backends_are_words_of_the_field() -> None:
    assert names((SOURCES / "backends").rglob("*.py"), OLD_NAMES_OF_BACKENDS) == []
