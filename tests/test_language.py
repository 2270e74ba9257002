"""Docstrings of the package are sentences with a subject, in the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tfla

SOURCES = Path(tfla.__file__).parent
# A docstring that begins so has the name above it for a subject, or none.
FRAGMENT = re.compile(
    r"^(Of|That|Those|Which|As|What|Where|By|To|In|From|Whether|With|For|Behind|And|Is|Its|It|Like|At|On|Who)\b"
)
# Earlier names; the terms are implementation, candidate, baseline, worker pool and the warps by what they do.
OLD_NAMES = re.compile(r"^(ways?|contenders?|crew|gater|carrier|clearer)$", re.IGNORECASE)
BANNED = re.compile(r"\b(anew|nobody|somebody|gaters?|clearers?|carriers?|homemade)\b", re.IGNORECASE)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of the package."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(SOURCES)}:{line} {text.splitlines()[0]}", text


def test_docstrings_are_not_fragments() -> None:
    found = list(docstrings())
    assert len(found) > 1000
    assert [place for place, text in found if FRAGMENT.match(text)] == []


def test_docstrings_use_words_of_the_field() -> None:
    assert [place for place, text in docstrings() if BANNED.search(text)] == []


def test_names_are_words_of_the_field() -> None:
    files = [*SOURCES.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    places = [
        f"{path}:{token.start[0]}: {token.string}"
        for path in sorted(files)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME and OLD_NAMES.match(token.string)
    ]
    assert places == []
