"""The errors of each dtype are within its bounds; gates keep their dtype; autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    FORMS,
    TOLERANCE,
    Implementation,
    call,
    check,
    check_beside_terms,
    error,
    errors,
    gradients,
    leaves_on,
    problem,
    solve,
    truth,
    truth_m,
)

import tfla

SEEDS = 8
LOW = [torch.bfloat16, torch.float16]
GATE_DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(implementation: Implementation, form: str, dtype: torch.dtype) -> None:
    p = problem(form, dtype=dtype, T=150, Hq=1, H=2, K=16, V=24)
    found = solve(p, implementation)
    check(found, truth(p), dtype)
    assert {found[name].dtype for name in ("h", "dq", "dk", "dv")} == {dtype}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_errors_are_those_of_rounding_inputs_and_outputs(
    implementation: Implementation, form: str, dtype: torch.dtype
) -> None:
    found: list[dict[str, float]] = []
    unavoidable: list[dict[str, float]] = []
    for seed in range(SEEDS):  # a gradient of m has few elements, each a difference
        exact = truth(problem(form, T=150, K=16, V=24, seed=seed))
        p = problem(form, dtype=dtype, T=150, K=16, V=24, seed=seed)
        rounded = {name: x.to(dtype) if name in ("h", "dq", "dk", "dv") else x for name, x in truth(p).items()}
        found.append(errors(solve(p, implementation), exact))
        unavoidable.append(errors(rounded, exact))
    for name in found[0]:
        ours, least = (sum(e[name] ** 2 for e in every) ** 0.5 for every in (found, unavoidable))
        assert ours <= 1.5 * least, name


@pytest.mark.parametrize("form", ["exp", "plain"])
@pytest.mark.parametrize(("i_dtype", "f_dtype"), GATE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_dtypes(
    implementation: Implementation, form: str, dtype: torch.dtype, i_dtype: torch.dtype, f_dtype: torch.dtype
) -> None:
    p = problem(form, dtype=dtype, i_dtype=i_dtype, f_dtype=f_dtype)
    found = solve(p, implementation)
    check(found, truth(p), dtype)
    assert (found["di"].dtype, found["df"].dtype) == (i_dtype, f_dtype)


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gates_are_not_rounded_to_the_dtype_of_q(implementation: Implementation, dtype: torch.dtype, gate: str) -> None:
    """Fast decays, and input gates that fall with them: every step matters to the end, with many gates in between."""
    f = -10 * torch.rand(2, 30, 2, generator=torch.Generator().manual_seed(1)) - 1
    p = problem("normalized", dtype=dtype, T=30, carried=False).but(f=f, i=300 + f.cumsum(1))
    rounded = p.but(**{gate: getattr(p, gate).to(dtype)})
    exact = truth(p)["h"]
    assert error(solve(p, implementation)["h"], exact) < 0.5 * error(solve(rounded, implementation)["h"], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_kept_in_at_least_float32(implementation: Implementation, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = leaves_on(implementation, problem(dtype=dtype, carried=False))
    _, state = tfla.mlstm(*leaves.values(), return_state=True, **implementation.options)
    assert {x.dtype for x in state} == {wide}


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    """Sets PyTorch's, for one test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_float32_is_multiplied_as_pytorch_is_set(
    implementation: Implementation, form: str, matmul_precision: Callable[[str], None]
) -> None:
    """tf32x3 is as good as float32; tf32 itself has less, but more than bfloat16."""
    if implementation.backend != "triton" or implementation.device == "cpu":
        pytest.skip("has no choice")
    p = problem(form, dtype=torch.float32, T=150, Hq=1, H=2, K=32, V=48)
    exact, found = truth(p), {}
    for setting in ("highest", "high", "medium"):
        matmul_precision(setting)
        found[setting] = solve(p, implementation)
    check(found["highest"], exact, torch.float32)
    check(found["high"], exact, torch.float32)
    check(found["medium"], exact, torch.bfloat16)
    assert error(found["medium"]["h"], exact["h"]) > 10 * error(found["highest"]["h"], exact["h"])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast_is_a_cast_of_qkv_alone(implementation: Implementation, dtype: torch.dtype) -> None:
    if why := implementation.refusal(dtype):
        pytest.skip(why)
    leaves = leaves_on(implementation, problem(dtype=torch.float32))
    gates_and_state = {"i": leaves["i"], "f": leaves["f"]}
    state = tfla.State(leaves["C0"], leaves["n0"], leaves["m0"])
    options = {"initial_state": state, "return_state": True, **implementation.options}
    qkv = [leaves[name] for name in "qkv"]
    expected = tfla.mlstm(*(x.to(dtype) for x in qkv), **gates_and_state, **options)
    with torch.autocast(implementation.device, dtype=dtype):
        found = tfla.mlstm(*qkv, **gates_and_state, **options)
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    grads = [
        torch.autograd.grad(h.sum() + s.C.sum() + s.n.sum(), [*leaves.values()][:-1]) for h, s in (found, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


MIXED = {"float32, low": (0, 1, 1), "low, float32": (1, 0, 1), "float32 v": (1, 1, 0)}


@pytest.mark.interpreter
@pytest.mark.parametrize("wide", MIXED.values(), ids=MIXED.keys())
def test_autocast_takes_mixed_dtypes(implementation: Implementation, wide: tuple[int, ...]) -> None:
    """q, k and v may differ in dtype, as after norms of q and k: all three are cast before they are compared."""
    dtype = torch.float16
    p = problem(dtype=torch.float32, T=3)
    leaves = leaves_on(implementation, p)
    low = [leaves[name].detach().to(dtype) for name in "qkv"]
    mixed = [x if is_low else x.float() for x, is_low in zip(low, wide, strict=True)]
    i, f = leaves["i"].detach(), leaves["f"].detach()
    state = tfla.State(*(leaves[name].detach() for name in ("C0", "n0", "m0")))
    calls: list[Callable[..., Any]] = [
        lambda *x: tfla.mlstm(*x, i, f, **implementation.options),
        lambda *x: tfla.linear_attention(*x, -f.abs(), **implementation.options),
        lambda *x: tfla.mlstm_step(*(t[:, 0] for t in x), i[:, 0], f[:, 0], state, backend=implementation.backend)[0],
        lambda *x: tfla.mlstm_steps(*x, i, f, state, backend=implementation.backend)[0],
        lambda *x: tfla.linear_attention_steps(*x, -f.abs(), tfla.State(state.C), backend=implementation.backend)[0],
    ]
    for function in calls:
        expected = function(*low)
        with torch.autocast(implementation.device, dtype=dtype):
            for _ in range(2):
                found = function(*mixed)
                assert found.dtype == dtype
                assert torch.equal(found, expected)
            said = tfla.explain(*mixed, i, f, **implementation.options)
        assert said.backend == implementation.backend
        with pytest.raises(TypeError, match=r"^[kv]: got dtype"):
            function(*mixed)


def test_autocast_does_not_mix_float64(device: str) -> None:
    p = problem(dtype=torch.float32, carried=False)
    q, k, v, i, f = (x.to(device) for x in p.leaves.values())
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(TypeError, match=r"^k: got dtype torch.float64"):
        tfla.mlstm(q, k.double(), v, i, f)


def test_autocast_leaves_float64_alone(device: str) -> None:
    p = problem(carried=False)
    with torch.autocast(device, dtype=torch.bfloat16):
        h = tfla.mlstm(*(x.to(device) for x in p.leaves.values()))
    assert error(h.cpu(), truth(p)["h"]) < 1e-9


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_stored_states_of_lower_precision(implementation: Implementation, form: str, chunk_size: int) -> None:
    """Each is rounded once, to eight bits: results stay as good as those of bfloat16, beside the terms they are of."""
    p = problem(form, dtype=implementation.widest, T=150, Hq=1, H=2, K=16, V=24, f_mean=5.0)
    leaves = leaves_on(implementation, p)
    h, state = call(p, leaves, **implementation.options, chunk_size=chunk_size, store_dtype=torch.bfloat16)
    check_beside_terms(gradients(p, leaves, h, state, truth_m(p)), p, TOLERANCE[torch.bfloat16])


def test_stored_states_take_their_dtype(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest, T=150, carried=False)
    leaves = leaves_on(implementation, p).values()
    rows = tfla.explain(*leaves, **implementation.options, chunk_size=16).stored_states
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        tfla.mlstm(*leaves, **implementation.options, chunk_size=16, store_dtype=torch.bfloat16)
    assert {x.dtype for x in saved if x.shape == (rows, 2, 5, 7) and rows} <= {torch.bfloat16}
