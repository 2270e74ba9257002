"""The folder of stored results, and the checks of its files."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError, reason
from tfla.bench import schema

Row = dict[str, Any]
CHECKOUT = Path("benchmarks") / "results"
# The keys of rows and of options, by their earlier names, which results before 2026-11-25 have.
OLD_ROW_KEYS = {"way": "implementation"}
OLD_CONFIG_KEYS = {"peers": "baselines"}


def default_folder() -> Path:
    """Return the folder of results: that of the checkout in the working directory, else the installed one.

    A wheel has the results inside of the package; an installation in place has them in its checkout.
    """
    if CHECKOUT.is_dir():
        return CHECKOUT
    inside = Path(str(importlib.resources.files("tfla"))) / "bench" / "results"
    beside = inside.parents[3] / CHECKOUT
    return next((folder for folder in (inside, beside) if folder.is_dir()), CHECKOUT)


def check_folder(folder: Path) -> None:
    """Raise UserError where the folder of results does not exist."""
    if not folder.is_dir():
        raise UserError(f"results: got {str(folder)!r}, expected a folder of JSON files of `tfla bench`")


def read(path: Path) -> Row:
    """Read a file of results, which is a JSON object, and rename keys with earlier names.

    Raises:
        UserError: it cannot be read or has another form; the message names the file and says what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"got a JSON {type(found).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a result: {reason(error)}") from error
    if isinstance(found.get("rows"), list):
        found["rows"] = [_renamed(row, OLD_ROW_KEYS) for row in found["rows"]]
    if "config" in found:
        found["config"] = _renamed(found["config"], OLD_CONFIG_KEYS)
    return found


def _renamed(x: Any, names: dict[str, str]) -> Any:
    """Return a JSON object with other names of its keys, in its order; return a value that is no object as it is."""
    return {names.get(key, key): value for key, value in x.items()} if isinstance(x, dict) else x


def read_rows(path: Path, kind: str) -> Row:
    """Read a result of the kind "traffic" or "numerics" and check that its rows have every field that figures show.

    Raises:
        UserError: it is no such result; the message names the file and says what is wrong.
    """
    found = read(path)
    try:
        if found.get("kind", kind) != kind:
            raise ValueError(f"kind: got {schema.shown(found['kind'])}, expected {kind!r}")
        schema.check_fields(found, "", {"environment": schema.OBJECT})
        schema.check_fields(found["environment"], "environment.", schema.ENVIRONMENT)
        if kind == "numerics":
            schema.check_fields(found, "", {"grid": schema.OBJECT, "regimes": schema.OBJECT})
            schema.check_fields(found["grid"], "grid.", schema.GRID)
        for n, row in enumerate(_rows(found)):
            if kind == "traffic":
                schema.check_fields(row, f"rows[{n}].", schema.TRAFFIC)
                for m, kernel in enumerate(row["kernels"]):
                    schema.check_fields(kernel, f"rows[{n}].kernels[{m}].", schema.KERNEL)
            else:
                needed = schema.NUMERICS if "failed" in row else {**schema.NUMERICS, "error": schema.ERRORS}
                schema.check_fields(row, f"rows[{n}].", needed, {"mean_absolute_error_h": schema.AMOUNT})
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result: {error}") from error
    return found


def check_gpu_result(path: Path, found: Row, complete: bool) -> None:
    """Raise UserError unless ``found`` is a result of `tfla bench gpu`.

    Args:
        path: the file, for the message.
        found: the content of the file.
        complete: whether it must have every field that pages and figures show, and not only the times.
    """
    try:
        schema.check_fields(found, "", {"environment": schema.OBJECT, "config": schema.OBJECT})
        schema.check_fields(found["environment"], "environment.", schema.ENVIRONMENT)
        only = {"repeats": schema.CONFIG["repeats"]}
        schema.check_fields(found["config"], "config.", only, schema.CONFIG)
        for n, row in enumerate(_rows(found)):
            needed = ["name", *(schema.TIMED if "seconds" in row else ())]
            if complete and "x" in row:
                needed += ["x", "direction", "samples" if "seconds" in row else "error"]
            schema.check_fields(row, f"rows[{n}].", {name: schema.ROW[name] for name in needed}, schema.ROW)
        if complete:
            schema.check_fields(found, "", {"rates": schema.OBJECT, "axis": schema.TEXT})
            schema.check_fields(found["environment"], "environment.", {"versions": schema.OBJECT})
            schema.check_fields(found["config"], "config.", schema.SHOWN_CONFIG)
            for name in ("copy", "gemm"):
                schema.check_fields(found["rates"].get(name), f"rates.{name}.", schema.RATES)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result of tfla bench gpu: {error}") from error


def check_cpu_result(path: Path, found: Row) -> None:
    """Raise UserError, which names the path, unless ``found`` is a result of `tfla bench cpu`."""
    try:
        schema.check_fields(
            found, "", dict.fromkeys(("environment", "config"), schema.OBJECT) | {"memory": schema.LIST}
        )
        schema.check_fields(found["environment"], "environment.", schema.CPU_ENVIRONMENT)
        schema.check_fields(found["environment"]["shape"], "environment.shape.", schema.CPU_SHAPE)
        schema.check_fields(found["config"], "config.", schema.CPU_CONFIG)
        for n, row in enumerate(_rows(found)):
            needed = ("name", "T", *(() if "error" in row else schema.CPU_TIMED))
            schema.check_fields(row, f"rows[{n}].", {name: schema.CPU_ROW[name] for name in needed}, schema.CPU_ROW)
        for n, row in enumerate(found["memory"]):
            schema.check_fields(row, f"memory[{n}].", {"T": schema.COUNT, "extra_bytes": schema.BYTES})
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a result of tfla bench cpu: {error}") from error


def _rows(found: Row) -> list[Row]:
    """Return the rows of a result; raise ValueError where it has none."""
    schema.check_fields(found, "", {"rows": schema.LIST})
    rows: list[Row] = found["rows"]
    if not rows:
        raise ValueError("rows: got none, expected one or more")
    for n, row in enumerate(rows):
        schema.check_fields(row, f"rows[{n}].", {})
    return rows
