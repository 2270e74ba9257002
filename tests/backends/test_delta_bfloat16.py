"""The Triton kernels of the delta rule in bfloat16, as GPUs compute them, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import check_beside_rounding, check_beside_terms, delta_problem, with_short_gates

pytest.importorskip("triton")

from interpreted_bfloat16 import use_bfloat16
from test_delta_triton import BACKEND, solve

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="test_delta_triton.py has the same in bfloat16 on a GPU"),
]


@pytest.fixture(scope="module", autouse=True)
def bfloat16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_bfloat16(patch)
        patch.setattr(BACKEND, "unsupported", lambda x: None)
        yield


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "a large state read across a tile": ("gdn", {"T": 64, "K": 64, "V": 64, "seed": 1}),
    "one step, whose terms cancel": ("gdn", {"T": 1, "K": 1, "V": 1}),
    "unaligned head dims": ("comba", {"T": 70, "K": 13, "V": 35}),
    "gates by channel": ("kda", {"T": 40, "K": 16, "V": 16}),
    "no gates, whose roundings stay": ("deltanet", {"T": 300, "K": 16, "V": 16}),
}


@pytest.mark.parametrize(("model", "sizes"), SIZES.values(), ids=SIZES.keys())
def test_problems(model: str, sizes: dict[str, Any]) -> None:
    p = delta_problem(model, B=1, H=1, Hq=1, **sizes, dtype=torch.bfloat16)
    check_beside_terms(p, solve(p))


def test_gates_in_bfloat16() -> None:
    """How much a tile lets pass is the sum of its gates in float32, in whatever dtype they are."""
    p = with_short_gates(delta_problem("gdn", gates="long", T=70, B=1, H=1, Hq=1, K=16, V=16, dtype=torch.bfloat16))
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize(
    ("model", "alike"), [("deltanet", 0.9), ("gdn", 0.9), ("comba", 0.9), ("kda", 0.9), ("gla", 0.0)]
)
def test_errors_beside_those_of_rounding(model: str, alike: float) -> None:
    """Errors are at most 1.5 times what rounding inputs and outputs costs; other gates and sizes run on GPUs."""
    p = delta_problem(model, T=130, B=1, H=1, Hq=1, K=32, V=32, alike=alike)
    check_beside_rounding(p, "medium", solve, torch.bfloat16)


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_errors_without_gates_do_not_grow(alike: float) -> None:
    """Nothing decays in the 1,000 steps, so that a state which the backward rounds on its own would drift away."""
    p = delta_problem("deltanet", T=1000, B=1, H=1, Hq=1, K=32, V=32, alike=alike)
    check_beside_rounding(p, "medium", solve, torch.bfloat16)
