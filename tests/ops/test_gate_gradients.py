"""The errors of gradients of gates in float32 are those of rounding, like those of q and k."""

from __future__ import annotations

import pytest
import torch
from cases import Implementation, Problem, call, error, errors, leaves_on, params, problem, solve, truth

import tfla

ROUNDING = torch.finfo(torch.float32).eps / 2
# Means of the pre-activations of the forget gate: of a memory of some 1,000 steps, of 50, of 2, of none.
MEMORIES = {"long": 7.0, "medium": 4.0, "short": 0.0, "closed": -6.0}
LENGTHS = {"two tiles": 100, "1,024 steps": 1024}


def float32_problem(form: str, T: int, f_mean: float, carried: bool = False) -> Problem:
    """Return a problem, unless `carried` from a zero state and without a cotangent of the final state.

    With a normalizer all terms of it are positive: no denominator is a small difference, which would be the error.
    """
    exp = form == "exp"
    p = problem(
        form, B=1, T=T, K=32, V=32, i_mean=-2.0, f_mean=f_mean, carried=carried, positive_qk=exp, dtype=torch.float32
    )
    if not carried:
        return p.but(dstate=tfla.State(*(None if x is None else torch.zeros_like(x) for x in p.dstate)))
    if p.state is None or p.state.n is None:
        return p
    return p.but(state=p.state._replace(n=p.state.n.abs()))


@pytest.mark.parametrize("carried", [False, True], ids=["from zero", "carried"])
@pytest.mark.parametrize("T", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("f_mean", params(MEMORIES, ("short", "closed")))
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_errors_are_those_of_rounding(
    implementation: Implementation, form: str, f_mean: float, T: int, carried: bool
) -> None:
    """Errors are at most 20 roundings to float32, or three times those of dq and dk.

    Those are larger where the normalizer makes gradients of differences.
    """
    if implementation.small_only and T > 100:
        pytest.skip("too slow for long sequences")
    p = float32_problem(form, T, f_mean, carried)
    found = errors(solve(p, implementation), truth(p))
    allowed = max(20 * ROUNDING, 3 * found["dq"], 3 * found["dk"])
    assert max(found["di"], found["df"]) <= allowed, {name: f"{e:.1e}" for name, e in found.items()}


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [None, (1, 40, 0, 29)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_first_forget_gate_has_no_gradient_without_a_state(
    implementation: Implementation, form: str, lengths: tuple[int, ...] | None
) -> None:
    """There is nothing to forget, so the gradient is 0, not something that rounding left."""
    p = problem(form, T=70, lengths=lengths, carried=False, dtype=torch.float32)
    first = [0] if lengths is None else [0, 1, 41]
    leaves = leaves_on(implementation, p)
    h, _ = call(p, leaves, **implementation.options)
    df = torch.autograd.grad(h, leaves["f"], p.dh.to(h))[0]
    assert not df[:, first].any()
    assert df.any()


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_closed_gates_hide_nothing(implementation: Implementation, form: str) -> None:
    """The gradient of a closed gate is as small as the gate: its error is no larger than that of open ones."""
    p = float32_problem(form, 100, -20.0)
    exact = truth(p)
    assert exact["df"].norm() < 1e-6 * exact["di"].norm()
    assert error(solve(p, implementation)["df"], exact["df"]) <= 20 * ROUNDING


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_rounding_does_not_pass_closed_gates(implementation: Implementation, form: str) -> None:
    """After 64 open gates, gradients of closed ones are as exact as in a sequence of closed gates alone."""
    p = float32_problem(form, 160, 4.0)
    f = p.f.clone()
    f[:, 64:] -= 24.0
    p = p.but(f=f)
    exact = truth(p)["df"]
    assert exact[:, 64:].norm() < 1e-6 * exact.norm()
    assert error(solve(p, implementation)["df"][:, 64:], exact[:, 64:]) <= 20 * ROUNDING
