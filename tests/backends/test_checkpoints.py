"""The sum for the forget gate's gradient restarts at checkpoints; results do not depend on where they lie."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from cases import Implementation, check, errors, problem, solve, truth

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("chunk_size", [48, 80, 1000])
@pytest.mark.parametrize("lengths", [None, (64, 0, 90)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("form", "carried"),
    [pytest.param("exp", True, marks=pytest.mark.interpreter), ("exp", False), ("sigmoid", True), ("normalized", True)],
)
def test_any_place(
    implementation: Implementation, form: str, carried: bool, lengths: tuple[int, ...] | None, chunk_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The inputs are float32, because checkpoints are kept in the inputs' dtype."""
    if (implementation.backend, implementation.kernel) != ("triton", "fused"):
        pytest.skip("has no checkpoints")
    from tfla.backends.gpu import checkpoints

    monkeypatch.setattr(checkpoints, "CHECKPOINT_STEPS", {4: 32})
    p = problem(form, dtype=torch.float32, T=90, lengths=lengths, Hq=1, H=2, carried=carried)
    check(solve(p, implementation, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.interpreter
def test_float32_is_kept_from_adding_up(implementation: Implementation) -> None:
    """Over hundreds of steps the gradient of the forget gate stays about as exact as that of the input gate."""
    if (implementation.backend, implementation.kernel) != ("triton", "fused"):
        pytest.skip("has no checkpoints")
    p = problem("sigmoid", dtype=torch.float32, B=1, T=768, Hq=4, H=4, K=16, V=16, carried=False)
    found = errors(solve(p, implementation), truth(p))
    assert found["df"] <= 6 * found["di"]


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [None, (40, 0, 33)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_nothing_passes_the_first_forget_gate(
    implementation: Implementation, form: str, lengths: tuple[int, ...] | None
) -> None:
    """Without an initial state its gradient is zero, exactly."""
    if implementation.backend not in ("triton", "hopper"):
        pytest.skip("has no checkpoints")
    p = problem(form, dtype=torch.float32, T=73, lengths=lengths, carried=False)
    df = solve(p, implementation, chunk_size=32)["df"]
    first = [0] if lengths is None else [0, 40]
    assert not df[:, first].any()
    assert df[:, 1:40].any()
