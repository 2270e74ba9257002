"""The schema of stored results: the fields of each object and their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """The type of a field: its name for messages, and the test of a value."""

    name: str
    fits: Callable[[Any], bool]


def _number(x: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def or_none(kind: Kind) -> Kind:
    """Return the type whose values are those of ``kind`` and null."""
    return Kind(f"{kind.name} or null", lambda x: x is None or kind.fits(x))


def list_of(kind: Kind) -> Kind:
    """Return the type of lists whose elements are of ``kind``."""
    return Kind(f"a list, each {kind.name}", lambda x: isinstance(x, list) and all(map(kind.fits, x)))


TEXT = Kind("a text", lambda x: isinstance(x, str))
FLAG = Kind("true or false", lambda x: isinstance(x, bool))
OBJECT = Kind("an object", lambda x: isinstance(x, dict))
LIST = Kind("a list", lambda x: isinstance(x, list))
COUNT = Kind("a whole number of at least 1", lambda x: isinstance(x, int) and _number(x) and x >= 1)
BYTES = Kind("a whole number of at least 0", lambda x: isinstance(x, int) and _number(x) and x >= 0)
AMOUNT = Kind("a finite number of at least 0", lambda x: _number(x) and x >= 0)
RATE = Kind("a finite number above 0", lambda x: _number(x) and x > 0)
NUMBER = Kind("a finite number", _number)
FLOAT = Kind("a number", lambda x: isinstance(x, int | float) and not isinstance(x, bool))  # NaN where a run diverged
# Launch parameters are stored as they are printed.
STEPS = ("tile", "chunk", "segment")
DETAILS = Kind(
    "an object whose tile, chunk and segment are numbers of steps",
    lambda x: isinstance(x, dict) and all(str(x[k]).isdecimal() and int(x[k]) for k in STEPS if k in x),
)

Fields = Mapping[str, Kind]

SHAPE: Fields = dict.fromkeys(("B", "T", "H", "dqk", "dhv"), COUNT)
ENVIRONMENT: Fields = {"device": TEXT, "date": TEXT}
RATES: Fields = {"rested": RATE, "sustained": RATE}
# `tfla bench gpu`: optional fields of every row; fields of timed rows; fields that pages and figures show.
ROW: Fields = {
    "name": TEXT, "group": TEXT, "x": COUNT, "direction": TEXT, "implementation": TEXT, "error": TEXT,
    "details": DETAILS, **SHAPE, "samples": COUNT, "peak_bytes": or_none(BYTES),
    "state_bytes": BYTES, "moved_bytes": BYTES,
    **dict.fromkeys(
        ("seconds", "sustained_seconds", "floor_seconds", "sustained_floor_seconds", "ratio", "tokens_per_second"), RATE
    ),
    "first_calls": list_of(OBJECT), "allocated_bytes": BYTES, "processes": COUNT, "streams": OBJECT,
    "operator_seconds": AMOUNT, "operator_share": AMOUNT,
}  # fmt: skip
TIMED = ("x", "direction", "seconds")
CONFIG: Fields = {"repeats": COUNT, "only": list_of(TEXT), "lengths": list_of(COUNT)}
SHOWN_CONFIG: Fields = {"suite": TEXT, "warmup": BYTES, "pause": AMOUNT, "sustained": AMOUNT}
# `tfla bench cpu`.
CPU_ENVIRONMENT: Fields = {"cpu": TEXT, "threads": COUNT, "date": TEXT, "versions": OBJECT, "shape": OBJECT}
CPU_SHAPE: Fields = {name: COUNT for name in SHAPE if name != "T"} | {"dtype": TEXT}
CPU_CONFIG: Fields = {"repeats": COUNT, "attention_up_to": NUMBER}
CPU_ROW: Fields = {
    "name": TEXT, "T": COUNT, "direction": TEXT, "error": TEXT, "seconds": RATE, "ratio": RATE, "floor_seconds": RATE,
}  # fmt: skip
CPU_TIMED = ("direction", "seconds", "ratio", "floor_seconds")
# Rows of the other kinds of results, in which all fields are required.
TRAFFIC: Fields = {
    "gate": TEXT,
    "direction": TEXT,
    "implementation": TEXT,
    "details": DETAILS,
    **SHAPE,
    "kernels": list_of(OBJECT),
}
KERNEL: Fields = {"read": AMOUNT, "written": AMOUNT}
ERRORS = Kind(
    "an object of numbers", lambda x: isinstance(x, dict) and all(_number(v) for v in x.values()) and "h" in x
)
NUMERICS: Fields = {
    "implementation": TEXT, "dtype": TEXT, "gate": TEXT, "regime": TEXT, "T": COUNT, "chunk_size": or_none(COUNT),
}  # fmt: skip
GRID: Fields = {"T": COUNT, "chunk_sizes": list_of(COUNT), "lengths": list_of(COUNT)}

# `tfla experiment`.
SIZE: Fields = dict.fromkeys(("steps", "batch_size", "context", "d_model", "num_blocks"), COUNT)
CURVE = list_of(or_none(FLOAT))
RUN: Fields = {
    "parameters": COUNT, "evals": list_of(OBJECT), "failed": TEXT,
    **dict.fromkeys(("step", "loss", "max_input_gate"), CURVE), "grad_norm": list_of(FLOAT),
}  # fmt: skip
EVALUATION: Fields = {"step": BYTES, "bits_per_byte": FLOAT, "perplexity": FLOAT}


def check_fields(found: Any, at: str, needed: Fields, others: Fields | None = None) -> None:
    """Raise ValueError unless an object has the required fields, and these and the optional ones have their types.

    Args:
        found: the object.
        at: its place in the file followed by a dot, for the message.
        needed: the required fields.
        others: the optional fields.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{at.rstrip('.')}: got {shown(found)}, expected an object")
    for name, kind in {**(others or {}), **needed}.items():
        if name not in found:
            if name in needed:
                raise ValueError(f"{at}{name}: got nothing, expected {kind.name}")
        elif not kind.fits(found[name]):
            raise ValueError(f"{at}{name}: got {shown(found[name])}, expected {kind.name}")


def shown(value: object) -> str:
    """Return a value as text for a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
