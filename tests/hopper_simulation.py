"""The simulator of Hopper's kernels around each module of tests, where Triton's interpreter is on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import INTERPRETED


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from gluon_simulator.hopper import on_cpu

    with on_cpu():
        yield
