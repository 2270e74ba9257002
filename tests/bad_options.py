"""Values of options that users get wrong, by the type of the option, for property-based tests of the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

WORDS = (
    "",
    " ",
    "nope",
    "None",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "True",
    "[1]",
    "{}",
    "'x'",
    "ä",
    "--",
    "%s",
)
NUMBERS = ("0", "-1", "-0.0", "1e-320", "1e300", str(2**31), str(2**63), str(10**30), "9" * 400)
# Nothing of these can be made, whoever asks.
PLACES = ("/dev/null", "/dev/null/x", "/proc/nowhere/x", "x" * 300, "/" + "x/" * 3000, "")


def option_name(path: str) -> str:
    """The flag of a field, as the command line spells it."""
    return "--" + path.replace("_", "-")


def fields_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every option that a dataclass makes, those of dataclasses inside it included."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from fields_of(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name]


def bad_texts(kind: Any) -> st.SearchStrategy[str]:
    """Texts for one value of a type: most cannot be read as it, or are out of any range."""
    texts = [
        st.sampled_from(WORDS),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    ]
    kinds = (kind, *get_args(kind))
    if int in kinds or float in kinds:
        texts += [st.sampled_from(NUMBERS), st.integers(-5, 0).map(str)]
    if Path in kinds:
        texts = [st.sampled_from(PLACES)]  # a place that could be written to would be
    return st.one_of(texts)


def arguments(name: str, kind: Any) -> st.SearchStrategy[list[str]]:
    """The words of one option with bad values, or with none, or with too many."""
    flag = option_name(name)
    if kind is bool:
        return st.one_of(
            st.sampled_from([[flag], [flag.replace("--", "--no-", 1)]]), bad_texts(str).map(lambda text: [flag, text])
        )
    value = bad_texts(next((k for k in get_args(kind) if k is not type(None)), kind) if get_origin(kind) else kind)
    several = st.lists(value, max_size=3).map(lambda texts: [flag, *texts])
    return st.one_of(value.map(lambda text: [flag, text]), value.map(lambda text: [f"{flag}={text}"]), several)


def options(kind: type, leave_out: tuple[str, ...] = ()) -> st.SearchStrategy[list[str]]:
    """Words of one or two options of a dataclass, with bad values.

    Args:
        kind: the dataclass.
        leave_out: names of options that are not drawn.
    """
    one = st.one_of([arguments(name, found) for name, found in fields_of(kind) if name not in leave_out])
    return st.lists(one, min_size=1, max_size=2).map(lambda words: [word for option in words for word in option])


def run_command(main: Callable[[list[str]], int], args: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it wrote to stderr.

    Any exception but SystemExit goes through, and fails the test: it would be a traceback. What a command says itself,
    and not the parser of its options, has to be one line.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(args)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    said = err.getvalue()
    assert "Traceback" not in said
    after = said.partition("tfla: error: ")[2].partition("\n")[2].strip()
    assert not after or after.startswith("usage: "), said
    return code, said
