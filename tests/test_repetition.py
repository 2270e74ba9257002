"""The package has at most ten pairs of places that share six or more lines of logic.

Lines of logic are the lines of function bodies without docstrings, comments, nested signatures, imports and lone
punctuation. Two places share them where the lines are the same up to a consistent renaming; names of attributes and of
called functions, and literals, have to be equal. A place is a run of lines of one function. Runs that two functions
share are one pair of places if they overlap or abut on both sides.
"""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import tokenize
from collections import defaultdict
from pathlib import Path

import tfla

SOURCES = Path(tfla.__file__).parent
RUN = 6  # lines that make a repetition
PAIRS = 10  # of places, that the package may have
LEFT_OUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
Line = tuple[int, list[tokenize.TokenInfo]]  # number in the file, tokens


def logic_lines(tree: ast.Module) -> tuple[set[int], set[int]]:
    """Return the numbers of lines of function bodies, and of lines before which a function begins or ends."""
    inside: set[int] = set()
    outside: set[int] = set()
    borders: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            outside.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first, body = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.body[0]
            outside.update(range(first, body.lineno))
            borders.update((first, (node.end_lineno or 0) + 1))
            if isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant):  # a docstring, or `...`
                outside.update(range(body.lineno, (body.end_lineno or 0) + 1))
            if not isinstance(node, ast.ClassDef):
                inside.update(range(body.lineno, (node.end_lineno or 0) + 1))
    return inside - outside, borders


def functions(text: str) -> list[list[Line]]:
    """Return the lines of logic of each function."""
    numbers, borders = logic_lines(ast.parse(text))
    lines: dict[int, list[tokenize.TokenInfo]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LEFT_OUT and token.start[0] in numbers:
            lines[token.start[0]].append(token)
    found: list[list[Line]] = [[]]
    previous = 0
    for number in sorted(lines):
        if any(t.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING) for t in lines[number]):
            if any(previous < border <= number for border in borders):
                found.append([])
            found[-1].append((number, lines[number]))
            previous = number
    return found


def renamed(lines: list[Line]) -> tuple[str, ...]:
    """Return the tokens of lines with variables named by the order in which they first stand."""
    order: dict[str, str] = {}
    found = []
    for _, tokens in lines:
        for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
            text = token.string
            variable = token.type == tokenize.NAME and not keyword.iskeyword(text)
            if variable and (before is None or before.string != ".") and (after is None or after.string != "("):
                text = order.setdefault(text, f"<{len(order)}>")
            found.append(text)
        found.append("\n")
    return tuple(found)


Run = tuple[int, int, int, int]  # the first lines of both places in their functions, and the lines after the last


def merged(runs: list[Run]) -> list[Run]:
    """Return runs that two functions share, those that overlap or abut on both sides as one."""
    found: list[Run] = []
    for run in sorted(runs):
        near = [x for x in found if run[0] <= x[1] and x[0] <= run[1] and run[2] <= x[3] and x[2] <= run[3]]
        found = [x for x in found if x not in near]
        (i, k, j, n) = zip(run, *near, strict=True)
        found.append((min(i), max(k), min(j), max(n)))
    return found


def repetitions(files: dict[str, str]) -> list[str]:
    """Return the pairs of places that share at least RUN lines, the longest first."""
    blocks = [(name, lines) for name, text in files.items() for lines in functions(text)]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for block, (_, lines) in enumerate(blocks):
        for start in range(len(lines) - RUN + 1):
            places[renamed(lines[start : start + RUN])].append((block, start))
    shared: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for found in places.values():
        for (a, i), (b, j) in itertools.combinations(found, 2):
            if a != b or abs(i - j) >= RUN:
                shared[a, b].append((i, i + RUN, j, j + RUN))
    pairs: list[tuple[int, str]] = []
    for (a, b), runs in shared.items():
        for i, k, j, n in merged(runs):
            sides = [
                f"{blocks[block][0]}:{blocks[block][1][first][0]}-{blocks[block][1][end - 1][0]}"
                for block, first, end in ((a, i, k), (b, j, n))
            ]
            pairs.append((max(k - i, n - j), " ~ ".join(sides)))
    return [f"{count} lines {sides}" for count, sides in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))]


def test_places_share_little_logic() -> None:
    files = {str(path.relative_to(SOURCES)): path.read_text("utf-8") for path in sorted(SOURCES.rglob("*.py"))}
    found = repetitions(files)
    assert len(found) <= PAIRS, "\n".join(found)


BODY = ["a = f(x)", "b = a + 1", "if b:", "    a.append(b)", "c = {1: b}", "d = g(c)", "return d"]


def function(lines: list[str], name: str = "f") -> str:
    return f'def {name}(\n    x,\n):\n    """Return."""\n' + "\n".join("    " + line for line in lines) + "\n"


def test_repetitions_are_found() -> None:
    other = [line.replace("b", "beta") for line in BODY]
    assert repetitions({"a": function(BODY), "b": function(BODY)}) == ["7 lines a:5-11 ~ b:5-11"]
    assert repetitions({"a": function(BODY) + function(BODY, "g")}) == ["7 lines a:5-11 ~ a:16-22"]
    assert len(repetitions({"a": function(BODY), "b": function(other), "c": function(BODY)})) == 3
    apart = [*BODY, *"pqrs", *BODY]  # each run on both sides is a pair of places with each of the other side
    assert len(repetitions({"a": function(apart), "b": function(BODY)})) == 3
    twice = [*BODY[:6], "e = f(x)", *BODY[:6]]
    assert repetitions({"a": function(twice), "b": function(twice, "g")})[0] == "13 lines a:5-17 ~ b:5-17"
    with_comments = [line for text in BODY for line in ("# why", "", text)]
    assert len(repetitions({"a": function(BODY), "b": function(with_comments)})) == 1


def test_what_is_no_repetition() -> None:
    assert repetitions({"a": function(BODY[:5]), "b": function(BODY[:5])}) == []
    assert repetitions({"a": function(BODY), "b": function([line.replace("f(", "h(") for line in BODY[:6]])}) == []
    assert repetitions({"a": function(BODY[:6]), "b": function([line.replace("1", "2") for line in BODY[:6]])}) == []
    fields = "\n".join(f"    {name}: int = 0" for name in "abcdefgh")
    assert repetitions({"a": f"class A:\n{fields}\n", "b": f"class B:\n{fields}\n"}) == []
    imports = ["import os"] * 8
    assert repetitions({"a": function(imports), "b": function(imports)}) == []
