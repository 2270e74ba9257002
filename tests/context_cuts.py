"""Random cuts of sequences among processes, and the results of all processes beside those of one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from cases import PER_STEP, error
from context_parts import own_steps
from hypothesis import strategies as st
from torch import Tensor

OF_STEPS = {*PER_STEP, "dbeta", "dlog_f", "dread_key", "da", "db"}


def whole(found: list[dict[str, Tensor]], order: str, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The quantities of all ranks as those of one process."""
    size, result = len(found), {}
    for name, x in found[0].items():
        every = [part[name] for part in found]
        if name in OF_STEPS:
            steps = torch.cat([own_steps(rank, size, order, lengths) for rank in range(size)])
            result[name] = torch.cat(every, 1)[:, steps.argsort()]
        elif name in ("C", "n"):
            assert all(torch.equal(x, other) for other in every)  # the final states are equal on every rank
            result[name] = x
        else:
            result[name] = torch.stack(every).sum(0)
    return result


@st.composite
def cuts(draw: Any, most: int = 9) -> tuple[int, str, tuple[int, ...]]:
    """The number of processes, the order and the lengths of spans."""
    size, order = draw(st.integers(2, 4)), draw(st.sampled_from(["contiguous", "zigzag"]))
    count = size * (2 if order == "zigzag" else 1)
    return size, order, tuple(draw(st.lists(st.integers(1, most), min_size=count, max_size=count)))


@st.composite
def sequences(draw: Any, total: int) -> dict[str, Any]:
    """The sizes of a problem with that many steps: a dense batch or packed sequences."""
    if draw(st.booleans()):
        return {"B": draw(st.integers(1, 2)), "T": total}
    ends = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=7))), total]
    return {"lengths": tuple(b - a for a, b in itertools.pairwise(ends))}


def compare(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == exact.keys()
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    assert all(e <= tolerance for e in errors.values()), {name: f"{e:.1e}" for name, e in errors.items()}


def each_share(data: st.DataObject, size: int) -> list[dict[str, float]]:
    """The shares of ranks in the cotangents of the final states."""
    if data.draw(st.booleans()):
        only = data.draw(st.integers(0, size - 1))
        return [{"share": float(rank == only)} for rank in range(size)]
    return [{"share": 1.0 / size}] * size
