"""The folder of stored results, and the check that a file in it is one."""

from __future__ import annotations

import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

from tfla.train.messages import UserError, reason

Row = dict[str, Any]
CHECKOUT = Path("benchmarks") / "results"
Kind = type | tuple[type, ...]
NUMBER: Kind = (int, float)
SIZES = ("B", "T", "H", "dqk", "dhv")


def default_folder() -> Path:
    """Return the folder of results: the checkout's that is the working directory, else the installed one.

    A wheel has the results inside of the package; an installation in place has them in its checkout.
    """
    if CHECKOUT.is_dir():
        return CHECKOUT
    inside = Path(str(importlib.resources.files("tfla"))) / "bench" / "results"
    beside = inside.parents[3] / CHECKOUT
    return next((folder for folder in (inside, beside) if folder.is_dir()), CHECKOUT)


def check_folder(folder: Path) -> None:
    """Raise UserError where results are asked for from a folder that is none."""
    if not folder.is_dir():
        raise UserError(f"results: got {str(folder)!r}, expected a folder of JSON files of `tfla bench`")


def read(path: Path) -> Row:
    """Read a JSON object, which results are.

    Raises:
        UserError: it cannot be read or is none; the message names the file and says what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"got a JSON {type(found).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a result: {reason(error)}") from error
    return found


def read_kind(path: Path, kind: str) -> Row:
    """Read a result with rows that says of which kind it is.

    Raises:
        UserError: it is not; the message names the file and says what is wrong.
    """
    found = read(path)
    try:
        if found.get("kind", kind) != kind:
            raise ValueError(f"kind: got {found['kind']!r}, expected {kind!r}")
        _need(found, "", environment=dict)
        _need(found["environment"], "environment.", device=str, date=str)
        _rows(found)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result: {error}") from error
    return found


def check_gpu_result(path: Path, found: Row, complete: bool) -> None:
    """Raise UserError unless that is a result of `tfla bench gpu`.

    Args:
        path: what the error names.
        found: what was read from it.
        complete: whether all that a page or a figure shows is needed, and not the times alone.
    """
    try:
        _need(found, "", environment=dict, config=dict)
        _need(found["environment"], "environment.", device=str, date=str)
        _need(found["config"], "config.", repeats=int)
        rows = _rows(found)
        for n, row in enumerate(rows):
            at = f"rows[{n}]."
            _need(row, at, name=str)
            if "seconds" in row:
                _need(row, at, x=int, direction=str, seconds=NUMBER)
                if not row["seconds"] > 0:
                    raise ValueError(f"{at}seconds: got {row['seconds']}, expected a number above 0")
            if complete and "x" in row:
                _need(row, at, x=int, direction=str)
                _need(row, at, **({"samples": int} if "seconds" in row else {"error": str}))
        if complete:
            _complete(found)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result of tfla bench gpu: {error}") from error


def check_cpu_result(path: Path, found: Row) -> None:
    """Raise UserError unless that is a result of `tfla bench cpu`; arguments as for :func:`check_gpu_result`."""
    try:
        _need(found, "", config=dict, memory=list)
        _need(found["environment"], "environment.", cpu=str, threads=int, date=str, versions=dict, shape=dict)
        shape = found["environment"]["shape"]
        _need(shape, "environment.shape.", B=int, H=int, dqk=int, dhv=int, dtype=str)
        _need(found["config"], "config.", repeats=int, attention_up_to=int)
        for n, row in enumerate(_rows(found)):
            _need(row, f"rows[{n}].", name=str, T=int)
            if "error" not in row:
                _need(row, f"rows[{n}].", direction=str, seconds=NUMBER, ratio=NUMBER, floor_seconds=NUMBER)
        for n, row in enumerate(found["memory"]):
            _need(row, f"memory[{n}].", T=int, extra_bytes=int)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result of tfla bench cpu: {error}") from error


def _complete(found: Row) -> None:
    _need(found["environment"], "environment.", versions=dict)
    _need(found["config"], "config.", warmup=int, pause=NUMBER, sustained=NUMBER, suite=str)
    _need(found, "", rates=dict, axis=str)
    _need(found["rates"], "rates.", copy=dict, gemm=dict)
    for name in ("copy", "gemm"):
        _need(found["rates"][name], f"rates.{name}.", rested=NUMBER, sustained=NUMBER)


def _rows(found: Row) -> list[Row]:
    _need(found, "", rows=list)
    rows: list[Any] = found["rows"]
    if not rows:
        raise ValueError("rows: got none, expected one or more")
    for n, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"rows[{n}]: got a JSON {type(row).__name__}, expected an object")
    return rows


def _need(found: Any, at: str, **kinds: Kind) -> None:
    """Raise ValueError unless an object has those fields, of those kinds; numbers have to be finite."""
    if not isinstance(found, dict):
        raise ValueError(f"{at.rstrip('.')}: got a JSON {type(found).__name__}, expected an object")
    for name, kind in kinds.items():
        value = found.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            got = "nothing" if name not in found else repr(value)[:60]
            raise ValueError(f"{at}{name}: got {got}, expected {names}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{at}{name}: got {value}, expected a finite number")
