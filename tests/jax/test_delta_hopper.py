"""Hopper's kernels of the delta rule and of gates by channel from JAX.

They run on a Hopper GPU, where their bits are those of PyTorch. With TRITON_INTERPRET=1 their plans run on the CPU,
Gluon kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax_delta_cases
import pytest
import torch
from cases import INTERPRETED
from delta_cases import DeltaProblem, check_beside_terms, delta_problem
from jax_plans import ON_GPU, plans_run
from torch import Tensor

import tfla.jax

ON_HOPPER = ON_GPU and jax.devices()[0].compute_capability == "9.0"
pytestmark = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="JAX has no Hopper GPU here")]
)
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.delta_h", exc_type=ImportError)
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from gluon_simulator.hopper import on_cpu

    with on_cpu():
        yield


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch, architecture=90):
        yield


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one tile": ("gdn", {"T": 64, "K": 128, "carried": False}),
    "heads that share keys": ("gdn", {"T": 70, "K": 64, "Hq": 1, "H": 2}),
    "wide": ("gdn", {"T": 70, "K": 72, "V": 136}),
    "wide, without gates": ("deltanet", {"T": 70, "K": 64, "V": 192}),
    "packed": ("gdn", {"lengths": (0, 66, 3), "K": 128}),
    "kda": ("kda", {"T": 70, "K": 64}),
    "kda, packed": ("kda", {"lengths": (5, 0, 66), "K": 64, "V": 136}),
    "gla": ("gla", {"T": 70, "K": 64}),
}
SMALL: dict[str, Any] = {"B": 1, "H": 1, "Hq": 1, "V": 64, "dtype": DTYPE}


def problem(case: str) -> DeltaProblem:
    model, sizes = CASES[case]
    return delta_problem(model, **SMALL | sizes)


def solve(p: DeltaProblem, **given: Any) -> dict[str, Tensor]:
    return jax_delta_cases.solve(p, backend="hopper", **given)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_recurrence(case: str) -> None:
    p = problem(case)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize(("model", "V"), [("gdn", 64), ("deltanet", 136)])
def test_segments(model: str, V: int) -> None:
    p = delta_problem(model, **SMALL | {"T": 150, "K": 64, "V": V, "H": 2})
    check_beside_terms(p, solve(p, kernel="segmented", chunk_size=64))


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the simulator in tests of their own")
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_pytorch(case: str, backend: str) -> None:
    jax_delta_cases.check_bits(problem(case), backend, "fused")


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the simulator in tests of their own")
@pytest.mark.parametrize(("model", "V"), [("gdn", 64), ("deltanet", 136)])
def test_bits_of_segments_are_those_of_pytorch(model: str, V: int) -> None:
    """One long sequence of one head is cut into segments by default."""
    jax_delta_cases.check_bits(delta_problem(model, **SMALL | {"T": 8192, "K": 64, "V": V}), "hopper", "segmented")


def test_explanation() -> None:
    x = jax_delta_cases.leaves_of(problem("one tile"))
    arrays = [x[name] for name in ("q", "k", "v", "beta", "log_f")]
    found = tfla.jax.explain_delta_rule(*arrays, backend="hopper")
    assert (found.backend, found.kernel) == ("hopper", "fused")
    assert found.not_taken["triton"] == "it could, but 'hopper' was asked for"
    found = tfla.jax.explain_delta_rule(*arrays)
    assert (found.backend, found.kernel) == ("hopper", "fused")
    assert found.not_taken["triton"] == found.not_taken["chunkwise"] == "it could, but 'hopper' comes before it"
    before = {"read_key": x["k"], "read_before_decay": True}
    reason = "it takes a read key with gates by channel alone"
    with pytest.raises(ValueError, match=r"^backend: 'hopper' cannot run this: "):
        tfla.jax.delta_rule(*arrays, **before, backend="hopper")
    assert tfla.jax.explain_delta_rule(*arrays, read_key=x["k"]).not_taken["hopper"] == reason
