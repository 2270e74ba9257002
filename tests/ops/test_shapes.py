"""The operator takes any shape: outputs, final states and all gradients are those of the recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FORMS, TOLERANCE, Implementation, check, check_beside_terms, leaves_on, params, problem, solve, truth

import tfla

SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1},
    "two steps": {"T": 2},
    "one batch row, one head": {"B": 1, "Hq": 1, "H": 1},
    "head dims of one": {"K": 1, "V": 1},
    "prime head dims": {"K": 13, "V": 29},
    "wide keys": {"K": 67, "V": 3},
    "wide values": {"K": 2, "V": 71},
    "powers of two": {"T": 64, "K": 16, "V": 32},
    "one more than a power of two": {"T": 65, "K": 17, "V": 33},
    "one less than a power of two": {"T": 127, "K": 15, "V": 31},
    "three values to a key": {"B": 1, "Hq": 2, "H": 6},
    "one key for all values": {"Hq": 1, "H": 5, "T": 70},
    "many batch rows": {"B": 7, "T": 9},
}
INTERPRETED = ("one step", "prime head dims", "one more than a power of two", "three values to a key")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", params(SHAPES, INTERPRETED))
def test_shape(implementation: Implementation, form: str, shape: dict[str, Any]) -> None:
    p = problem(form, dtype=implementation.widest, **shape)
    check(solve(p, implementation), truth(p), p.dtype)


@pytest.mark.parametrize(
    ("K", "V"),
    [(16, 16), (16, 1024), (31, 95), (64, 128), (72, 100), (96, 192), (128, 256), (255, 257), (256, 512), (512, 1024)],
)  # fmt: skip
@pytest.mark.parametrize(("form", "dtype"), [("exp", torch.float32), ("sigmoid", torch.bfloat16)], ids=str)
def test_wide_heads_on_gpus(implementation: Implementation, form: str, dtype: torch.dtype, K: int, V: int) -> None:
    """Their kernels are others for other head dims."""
    if implementation.device == "cpu":
        pytest.skip("is one code for all head dims")
    p = problem(form, B=1, T=70, Hq=1, H=1, K=K, V=V, dtype=dtype)
    check_beside_terms(solve(p, implementation), p, TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize("K", [pytest.param(520, marks=pytest.mark.interpreter), 1024])
def test_keys_too_wide_for_fused_scans(implementation: Implementation, form: str, K: int) -> None:
    p = problem(form, B=1, T=40, Hq=1, H=1, K=K, V=24, dtype=implementation.widest)
    if implementation.backend == "triton" and implementation.kernel == "fused":
        with pytest.raises(ValueError, match=r"kernel: 'fused' .* takes dqk up to 512"):
            solve(p, implementation)
    else:
        check_beside_terms(solve(p, implementation), p, TOLERANCE[p.dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 3, pytest.param(70, marks=pytest.mark.interpreter)])
def test_without_initial_state(implementation: Implementation, form: str, T: int) -> None:
    p = problem(form, dtype=implementation.widest, T=T, carried=False)
    ref = truth(p)
    for name, x in solve(p, implementation).items():
        # The first step's h is v for any q, k and gates, where the normalizer is not bounded: gradients of zero.
        assert (x - ref[name]).norm() <= TOLERANCE[p.dtype] * max(ref[name].norm().item(), 1.0), name


def test_zeros_are_the_default_initial_state(implementation: Implementation) -> None:
    leaves = leaves_on(implementation, p := problem(dtype=implementation.widest, carried=False))
    zeros = tfla.State.zeros(2, 2, 5, 7, dtype=p.dtype, device=implementation.device)
    given, missing = (
        tfla.mlstm(*leaves.values(), initial_state=state, return_state=True, **implementation.options)
        for state in (zeros, None)
    )
    assert torch.equal(given[0], missing[0])
    assert all(torch.equal(a, b) for a, b in zip(given[1], missing[1], strict=True))


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_no_batch_rows(implementation: Implementation, form: str) -> None:
    leaves = leaves_on(implementation, problem(form, dtype=implementation.widest, carried=False))
    h = tfla.mlstm(*(x[:0] for x in leaves.values()), input_gate=form, **implementation.options)
    h.sum().backward()
    assert h.shape == (0, 37, 2, 7)
    assert all(not x.grad.any() for x in leaves.values())


@pytest.mark.parametrize("scale", [1.7, -0.7, 0.0])
@pytest.mark.parametrize("form", FORMS)
def test_scale(implementation: Implementation, form: str, scale: float) -> None:
    p = problem(form, dtype=implementation.widest).but(scale=scale)
    check(solve(p, implementation), truth(p), p.dtype)
