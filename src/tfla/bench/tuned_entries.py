"""The tuned entries from stored results of `tfla bench gpu`, without new measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfla.bench.stored import load
from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH
from tfla.ops.tuned import Entry
from tfla.tune.choose import best
from tfla.tune.measure import Measured
from tfla.tune.predict import Candidate

Row = dict[str, Any]
SHAPE = ("B", "T", "H", "dqk", "dhv")
NEEDED = {"seconds", "implementation", "details", "peak_bytes", *SHAPE}
NOT_OF_SEQUENCES = ("decode", "steps", "generate", "host")  # suites of decoding steps and of host times


def candidate(row: Row, axis: str) -> Measured:
    """Return the candidate of a row, with the chunk size that was given or chosen."""
    backend, _, kernel = row["implementation"].partition(" ")
    details = row["details"]
    chunk = row["x"] if axis == "chunk size" else details.get("segment") or details["chunk"]
    found = Candidate(backend, kernel, int(chunk), row["seconds"], row["peak_bytes"])
    return Measured(found, row["seconds"], row["peak_bytes"])


def winners(result: Row) -> list[Row]:
    """Return an entry for each backend, shape and gate of one result with two measured candidates or more.

    There is no entry where the largest of several chunk sizes wins and the sequence is longer, because larger ones were
    not measured.
    """
    shapes: dict[tuple[Any, ...], dict[tuple[str, int], tuple[Measured, Row]]] = {}
    for row in result["rows"]:
        if row["name"].startswith("tfla mLSTM") and row.get("direction") == BOTH and set(row) >= NEEDED:
            if not isinstance(row["details"], dict) or not {"segment", "chunk"} & set(row["details"]):  # not of a GPU
                continue
            if ", packed" in row["name"]:  # another problem than the dense one of the same shape
                continue
            one = candidate(row, result.get("axis", ""))
            key = one.candidate.backend, row["name"].removeprefix("tfla mLSTM")[:3], *(row[name] for name in SHAPE)
            shapes.setdefault(key, {}).setdefault((one.candidate.kernel, one.candidate.chunk_size), (one, row))
    entries = []
    for (_, gate, B, T, H, dqk, dhv), found in shapes.items():
        winner = best([one for one, _ in found.values()], None)
        if len(found) < 2 or not isinstance(winner, Measured):
            continue
        c = winner.candidate
        sizes = [size for kernel, size in found if kernel == c.kernel]
        if len(sizes) > 1 and c.chunk_size == max(sizes) < T:
            continue
        env = found[c.kernel, c.chunk_size][1]["environment"]
        dtype = SUITES[result["suite"]].at(T).dtype
        entry = Entry(
            env["device"], c.backend, dtype, gate == "exp", B, T, H, dqk, dhv, c.kernel, c.chunk_size, False
        )  # fmt: skip
        entries.append(
            entry._asdict()
            | {"seconds": winner.seconds, "peak_bytes": winner.peak_bytes, "memory_limit": None, "among": len(found),
               "date": env["date"], "versions": env.get("versions", {})}
        )  # fmt: skip
    return entries


def entries(folder: Path) -> list[Row]:
    """Return the entries of all results in a folder; for a shape in several results, the one with most candidates."""
    found: dict[tuple[Any, ...], Row] = {}
    for result in load(folder).values():
        if result["suite"] not in NOT_OF_SEQUENCES:
            for row in winners(result):
                key = tuple(row[name] for name in Entry._fields[:9])
                if key not in found or row["among"] > found[key]["among"]:
                    found[key] = row
    return list(found.values())
