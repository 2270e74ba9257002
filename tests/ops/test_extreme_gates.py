"""Gates as they occur in real models: resets, fully open and closed gates, infinities, jumps; NaN."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, TOLERANCE, Implementation, Problem, call, check, error, leaves_on, problem, solve, truth

import tfla
from tfla.ops.gates import LOG_GATE_MAX, LOG_GATE_MIN

INF = float("inf")
# What gates may be: any pre-activation; log-gates that do not grow without bound where nothing stabilises them.
EXTREMES = {
    "exp": {"i": (1e4, -1e4, INF, -INF), "f": (1e4, -1e4, INF, -INF)},
    "sigmoid": {"i": (1e4, -1e4, INF, -INF), "f": (1e4, -1e4, INF, -INF)},
    "plain": {"i": (-1e4, -INF), "f": (-1e4, -INF, 0.0)},
    "normalized": {"i": (1e4, -1e4, INF, -INF), "f": (-1e4, -INF, 0.0)},
}
SINGLE = [(form, gate, value) for form, gates in EXTREMES.items() for gate, values in gates.items() for value in values]


def with_extremes(p: Problem, gate: str, values: tuple[float, ...]) -> Problem:
    """A sixth of the gates replaced."""
    generator = torch.Generator().manual_seed(7)
    x = getattr(p, gate)
    chosen = torch.tensor(values, dtype=x.dtype)[torch.randint(len(values), x.shape, generator=generator)]
    return p.but(**{gate: torch.where(torch.rand(x.shape, generator=generator) < 1 / 6, chosen, x)})


@pytest.mark.parametrize(("form", "gate", "value"), SINGLE)
def test_extreme_gate(implementation: Implementation, form: str, gate: str, value: float) -> None:
    p = with_extremes(problem(form, dtype=torch.float32, T=100, positive_qk=True), gate, (value,))
    check(solve(p, implementation), truth(p), p.dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [None, (40, 0, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_all_extremes_at_once(
    implementation: Implementation, form: str, dtype: torch.dtype, lengths: tuple[int, ...] | None
) -> None:
    p = problem(form, dtype=dtype, T=100, lengths=lengths, positive_qk=True)
    for gate, values in EXTREMES[form].items():
        p = with_extremes(p, gate, values)
    found, ref = solve(p, implementation), truth(p)
    assert all(x.isfinite().all() for x in found.values())
    if dtype == torch.bfloat16:  # one huge input gate makes h = v, with gradients that are all cancellation
        found, ref = ({name: x[name] for name in ("h", "C")} for x in (found, ref))
    check(found, ref, dtype)


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("value", [INF, -INF, 1e4, -1e4])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_every_gate_extreme(implementation: Implementation, form: str, gate: str, value: float) -> None:
    p = problem(form, dtype=implementation.widest, positive_qk=True)
    p = p.but(**{gate: torch.full_like(p.f, value)})
    found, ref = solve(p, implementation), truth(p)
    assert all(x.isfinite().all() for x in found.values())
    check({name: found[name] for name in ("h", "C")}, {name: ref[name] for name in ("h", "C")}, p.dtype)


def test_infinite_gates_act_like_finite_ones(implementation: Implementation) -> None:
    p = problem("normalized", dtype=implementation.widest)
    infinite = with_extremes(with_extremes(p, "i", (INF, -INF)), "f", (-INF,))
    finite = infinite.but(i=infinite.i.clamp(LOG_GATE_MIN, LOG_GATE_MAX), f=infinite.f.clamp(min=LOG_GATE_MIN))
    a, b = solve(infinite, implementation), solve(finite, implementation)
    assert all(torch.equal(a[name], b[name]) for name in ("h", "C", "n", "dq", "dk", "dv"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("lowest", [-50.0, 50.0])
def test_input_gates_that_jump(implementation: Implementation, dtype: torch.dtype, lowest: float) -> None:
    """exp(50) and far more than float32 holds, and back."""
    p = problem(dtype=dtype, T=100, f_mean=6.0, positive_qk=True)
    i = p.i.clone()
    i[:, 20:60] += lowest
    i[:, 40] += 50
    i[:, 80:] += torch.linspace(0, 100, 20, dtype=dtype)[:, None]
    p = p.but(i=i)
    check(solve(p, implementation), truth(p), dtype)


@pytest.mark.parametrize("m", [1e4, 60.0, -60.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_state_behind_extreme_gates(implementation: Implementation, dtype: torch.dtype, m: float) -> None:
    """A carried max state may be as large as a gate."""
    p = problem("normalized", dtype=dtype, T=100, positive_qk=True)
    p = p.but(state=p.state._replace(n=p.state.n.abs(), m=p.state.m + m))
    check(solve(p, implementation), truth(p), dtype)


@pytest.mark.parametrize("form", ["exp", "normalized"])
def test_zero_queries_and_keys_under_a_huge_input_gate(implementation: Implementation, form: str) -> None:
    """Padding: the output is 0 / max(0, 1), however small exp(-m) has become."""
    p = problem(form, dtype=implementation.widest, carried=False)
    i = p.i.clone()
    i[:, 3:] = 1e4
    zeros = {name: getattr(p, name).clone() for name in "qkv"}
    for x in zeros.values():
        x[:, 3:9] = 0
    zeros["k"][:, :3] = 0
    zeros["dh"] = p.dh.clone()
    zeros["dh"][:, 3:9] = 0
    found = solve(p.but(i=i, **zeros), implementation)
    assert not found["h"][:, :9].any()
    assert all(x.isfinite().all() for x in found.values())


def test_moderate_decays_behind_huge_input_gates(implementation: Implementation) -> None:
    """The max state may be huge while decays are small: they keep float32's accuracy."""
    p = problem("normalized", dtype=torch.float32, T=100, f_mean=4.0, positive_qk=True)
    i = p.i.clone()
    i[:, 5:] += 1e4
    p = p.but(i=i)
    check(solve(p, implementation), truth(p), torch.float32)


@pytest.mark.parametrize("name", ["q", "k", "v", "i", "f", "C0", "dh"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_nan_stays_in_its_batch_row_and_head(implementation: Implementation, form: str, name: str) -> None:
    """Not one bit changes elsewhere. (Packed sequences: test_packed.)"""
    p = problem(form, B=3, dtype=implementation.widest, T=70)
    before = solve(p, implementation)
    if name == "C0":
        C = p.state.C.clone()
        C[1, 0, 2, 3] = torch.nan
        p = p.but(state=p.state._replace(C=C))
    else:
        x = getattr(p, name).clone()
        x[1, 20, 0] = torch.nan
        p = p.but(**{name: x})
    after = solve(p, implementation)
    assert any(x.isnan().any() for x in after.values())
    for part, x in after.items():
        assert torch.equal(x[[0, 2]], before[part][[0, 2]]), part
        head = (slice(None), 1) if part[-1] in "Cn0" else (slice(None), slice(None), 1)
        assert torch.equal(x[head], before[part][head]), part


def test_nan_is_not_hidden(implementation: Implementation) -> None:
    """A clamp or a maximum must not turn it into a number."""
    for form in FORMS:
        p = problem(form, dtype=implementation.widest)
        for name in "ifkv":
            x = getattr(p, name).clone()
            x[0, 20] = torch.nan
            h, state = call(p, leaves_on(implementation, p.but(**{name: x})), **implementation.options)
            assert h[0, 20:].isnan().all(), (form, name)
            assert state.C[0].isnan().any(), (form, name)


@pytest.mark.interpreter
@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("form", FORMS)
def test_nan_of_a_gate_does_not_reach_earlier_steps(implementation: Implementation, form: str, gate: str) -> None:
    """Earlier steps of the same chunk are included."""
    p = problem(form, dtype=torch.float32, T=100)
    x = getattr(p, gate).clone()
    x[:, 70] = torch.nan
    before, _ = call(p, leaves_on(implementation, p), **implementation.options)
    after, _ = call(p, leaves_on(implementation, p.but(**{gate: x})), **implementation.options)
    assert error(after[:, :70], before[:, :70]) <= TOLERANCE[torch.float32]
    assert after[:, 70:].isnan().all()


def test_gates_of_a_step(device: str) -> None:
    p = problem(dtype=torch.float32)
    q, k, v, i, f = (getattr(p, name)[:, 0].to(device) for name in "qkvif")
    for value in (INF, -INF, 1e4, -1e4):
        for gates in ((i, torch.full_like(f, value)), (torch.full_like(i, value), f)):
            h, state = tfla.mlstm_step(q, k, v, *gates, p.state.to(device))
            assert all(x.isfinite().all() for x in (h, *state))
