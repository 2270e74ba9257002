"""The summary of docs/performance.md has the fastest of this library and of others at one size of each setup."""

from __future__ import annotations

from typing import Any

from tfla.bench.summary import summary

Row = dict[str, Any]
F, B = "forward", "forward + backward"


def timed(name: str, x: int, seconds: float, direction: str = B, **more: str) -> Row:
    return {"name": name, "x": x, "direction": direction, "seconds": seconds, **more}


def result(axis: str, *rows: Row) -> Row:
    return {"title": f"by {axis}", "axis": axis, "environment": {"device": "a GPU"}, "rows": list(rows)}


def lines(**results: Row) -> list[str]:
    return [line for line in summary(results).splitlines() if "by " in line and line.startswith(("|", "-"))]


def test_a_row_has_the_fastest_of_both_at_one_size() -> None:
    rows = [timed("tfla mLSTMexp", x, 0.002) for x in (4096, 8192, 16384)]
    rows += [timed("tfla mLSTMsig", 8192, 0.001), timed("fla chunk", 8192, 0.004), timed("fla chunk", 16384, 0.001)]
    rows += [timed("fla slow", 8192, 0.005), timed("fla chunk", 8192, 0.0001, F), timed("tfla mLSTMsig", 8192, 1, F)]
    rows += [{"name": "fla failed", "x": 8192, "direction": B, "error": "no memory"}, {"name": "absent"}]
    rows += [timed("device copy of C", 8192, 0.0001)]
    assert lines(fig=result("T", *rows)) == [
        "| [by T](#fig) | forward + backward, T 8,192, a GPU | 1.000 (mLSTMsig) | 4.000 (fla chunk) | 4.00 |"
    ]


def test_without_the_usual_size_the_largest_shared_one_counts() -> None:
    rows = [timed("tfla", x, 0.001) for x in (1, 16, 64)] + [timed("fla", x, 0.003) for x in (1, 16)]
    assert lines(step=result("batch", *rows)) == [
        "| [by batch](#step) | forward + backward, batch 16, a GPU | 1.000 (tfla) | 3.000 (fla) | 3.00 |"
    ]


def test_of_chunk_sizes_each_has_its_best() -> None:
    rows = [timed("tfla mLSTMsig", 1024, 0.001), timed("tfla mLSTMsig", 64, 0.002), timed("fla", 64, 0.003)]
    assert lines(fig5=result("chunk size", *rows)) == [
        f"| [by chunk size](#fig5) | {B}, best chunk size, a GPU | 1.000 (mLSTMsig) | 3.000 (fla) | 3.00 |"
    ]


def test_groups_have_rows_of_their_own_and_setups_without_others_are_linked() -> None:
    rows = [timed("tfla", 8192, 0.001, group="KDA"), timed("fla", 8192, 0.002, group="KDA")]
    rows += [timed("tfla", 8192, 0.001, F, group="GLA"), timed("fla", 8192, 0.003, F, group="GLA")]
    assert lines(delta=result("T", *rows), own=result("steps", timed("tfla", 1, 1))) == [
        "| [by T](#delta): KDA | forward + backward, T 8,192, a GPU | 1.000 (tfla) | 2.000 (fla) | 2.00 |",
        "| [by T](#delta): GLA | forward, T 8,192, a GPU | 1.000 (tfla) | 3.000 (fla) | 3.00 |",
        "- [by steps](#own)",
    ]
