"""Decoding steps without gradients, one or a few at once, by the kernels of backends and by the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import DTYPES, FORMS, TOLERANCE, Problem, error, params, problem, truth, truth_m
from steppers import Stepper, steppers
from torch import Tensor

import tfla
from tfla.backends import BACKENDS, StepInputs
from tfla.backends.base import StepOutputs, StepSpec

CUTS = (0, 1, 6, 22)
SHAPES: dict[str, dict[str, Any]] = {
    "one by one": {"K": 1, "V": 1},
    "grouped heads": {"Hq": 1, "H": 4, "K": 16, "V": 32},
    "odd": {"K": 33, "V": 70, "H": 1, "Hq": 1},
    "tall": {"K": 300, "V": 20, "B": 1},
    "wide": {"K": 20, "V": 300, "B": 1},
}


@pytest.fixture(params=steppers())
def stepper(request: pytest.FixtureRequest) -> Stepper:
    return request.param


def steps(p: Problem, stepper: Stepper, a: int, b: int, state: tfla.State, **options: Any) -> tuple[Tensor, tfla.State]:
    """Steps a to b of the problem."""
    q, k, v, i, f = (getattr(p, name)[:, a:b].to(stepper.device) for name in "qkvif")
    options = {"scale": p.scale, "backend": stepper.backend, **options}
    with torch.no_grad():
        if p.form in ("exp", "sigmoid"):
            return tfla.mlstm_steps(q, k, v, i, f, state, input_gate=p.form, **options)
        return tfla.linear_attention_steps(q, k, v, f, state, i, normalize=p.normalize, **options)


def start(p: Problem, stepper: Stepper) -> tfla.State:
    return p.state.to(stepper.device).clone()


def in_pieces(p: Problem, stepper: Stepper, cuts: tuple[int, ...] = CUTS) -> tuple[Tensor, tfla.State]:
    state, hs = start(p, stepper), []
    for a, b in itertools.pairwise(cuts):
        h, state = steps(p, stepper, a, b, state)
        hs.append(h)
    return torch.cat(hs, 1), state


def check_truth(p: Problem, h: Tensor, state: tfla.State) -> None:
    exact, m = truth(p), truth_m(p)
    assert h.dtype == p.dtype
    assert error(h.cpu(), exact["h"]) < TOLERANCE[p.dtype]
    weight = 1.0 if state.m is None else torch.exp(state.m.double().cpu() - m)
    for name in ("C", "n"):
        if (x := getattr(state, name)) is not None:
            shape = (*x.shape[:2], *[1] * (x.dim() - 2))
            scaled = x.double().cpu() * (1.0 if state.m is None else weight.view(shape))
            assert error(scaled, exact[name]) < max(TOLERANCE[torch.float32], TOLERANCE[p.dtype] / 10), name


@pytest.mark.parametrize("dtype", params({str(dtype): dtype for dtype in DTYPES}, {"torch.float16"}))
@pytest.mark.parametrize("form", params({form: form for form in FORMS}, {"exp", "plain"}))
def test_pieces_equal_the_truth(stepper: Stepper, form: str, dtype: torch.dtype) -> None:
    stepper.check_takes(dtype)
    p = problem(form, dtype=dtype, T=22).but(scale=0.7)
    check_truth(p, *in_pieces(p, stepper))


@pytest.mark.parametrize("shape", params(SHAPES, {"grouped heads", "tall", "odd"}))
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_any_shape(stepper: Stepper, form: str, shape: dict[str, Any]) -> None:
    p = problem(form, dtype=torch.float32, T=22, **shape)
    check_truth(p, *in_pieces(p, stepper))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_the_state_behind_as_many_steps_as_are_kept(stepper: Stepper, form: str) -> None:
    """Speculative decoding: outputs of all proposed tokens, the state after those that are kept."""
    p = problem(form, dtype=torch.float32, B=5, T=4, Hq=1, H=1)
    kept = torch.tensor([0, 1, 2, 3, 4], device=stepper.device)
    state = start(p, stepper)
    before = state.clone()
    whole, last = steps(p, stepper, 0, 4, state)
    assert torch.equal(steps(p, stepper, 0, 4, state, return_state=False), whole)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True) if a is not None)
    for lengths in (kept, kept.int()):
        h, found = steps(p, stepper, 0, 4, state, lengths=lengths)
        assert torch.equal(h, whole)
    for row, steps_kept in enumerate(kept.tolist()):
        expected = state if steps_kept == 0 else steps(p, stepper, 0, steps_kept, state)[1]
        for a, b in zip(found, expected, strict=True):
            assert a is None or error(a[row].cpu(), b[row].cpu()) < 1e-6
    assert torch.equal(found.C[4], last.C[4])


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_lengths_that_no_host_reads_are_bounded(stepper: Stepper, form: str) -> None:
    """The kernel is called directly, since on a CPU, where Triton's interpreter runs, the operator refuses them."""
    if stepper.backend == "reference":
        pytest.skip("compares them with each step")
    p = problem(form, dtype=torch.float32, B=5, T=4, Hq=1, H=1)
    q, k, v, i, f = (getattr(p, name).to(stepper.device) for name in "qkvif")
    state, gates = start(p, stepper), "exp" if form == "exp" else "log"

    def run(lengths: list[int]) -> StepOutputs:
        x = StepInputs(q, k, v, i, f, *state, torch.tensor(lengths, device=stepper.device))
        return BACKENDS[stepper.backend].steps(x, StepSpec(0.5, gates, True), None)

    found, expected = run([-3, -(2**40), 2, 9, 2**40]), run([0, 0, 2, 4, 4])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_in_place(stepper: Stepper, form: str) -> None:
    p = problem(form, dtype=torch.float32, T=3)
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, 3, state)
    ours = state.clone()
    again, found = steps(p, stepper, 0, 3, ours, in_place=True)
    assert found.C is ours.C
    assert torch.equal(again, h)
    for name in ("C", "n", "m"):
        assert getattr(expected, name) is None or torch.equal(getattr(found, name), getattr(expected, name))
    if state.n is not None:
        assert torch.equal(ours.n, state.n)


@pytest.mark.parametrize("kept", params({"float16": torch.float16, "bfloat16": torch.bfloat16}, {"float16"}))
def test_a_state_of_16_bits_stays_so(stepper: Stepper, kept: torch.dtype) -> None:
    """The arithmetic is that of float32, and the result is rounded once."""
    stepper.check_takes(torch.float32, kept)
    p = problem(dtype=torch.float32, T=3)
    state = start(p, stepper)
    low = state._replace(C=state.C.to(kept), n=state.n.to(kept))
    h, expected = steps(p, stepper, 0, 3, state._replace(C=low.C.float(), n=low.n.float()))
    found_h, found = steps(p, stepper, 0, 3, low)
    assert error(found_h, h) < 1e-6
    assert found.m.dtype == torch.float32
    for x, exact in ((found.C, expected.C), (found.n, expected.n)):
        assert x.dtype == kept
        assert error(x, exact) <= 1.01 * error(exact.to(kept), exact)
    steps(p, stepper, 0, 3, low, in_place=True)
    assert torch.equal(low.C, found.C)


@pytest.mark.interpreter
def test_any_strides(stepper: Stepper) -> None:
    p = problem(dtype=torch.float32, T=3, H=4, Hq=2)
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, 3, state)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    other = p.but(**{name: heads_first(getattr(p, name)) for name in "qkvif"})
    strided = tfla.State(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in state))
    for ours in (strided, strided._replace(C=state.C.transpose(2, 3).contiguous().transpose(2, 3))):
        found_h, found = steps(other, stepper, 0, 3, ours)
        assert error(found_h, h) < 1e-6
        assert all(error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))
        assert steps(other, stepper, 0, 3, ours, in_place=True)[1].C is ours.C
        assert error(ours.C, expected.C) < 1e-6


@pytest.mark.parametrize("form", ["exp", "normalized"])
@pytest.mark.parametrize("value", params({str(x): x for x in (torch.inf, -torch.inf, 1e4, -1e4)}, {"inf"}))
def test_extreme_gates(stepper: Stepper, form: str, value: float) -> None:
    p = problem(form, dtype=torch.float32, T=3, positive_qk=True)
    for name in ("i", "f"):
        if form == "normalized" and value > 0:
            continue  # grows without bound
        wrong = getattr(p, name).clone()
        wrong[:, 1] = value
        changed = p.but(**{name: wrong})
        check_truth(changed, *in_pieces(changed, stepper, (0, 2, 3)))


def test_nan_stays_in_its_sequence(stepper: Stepper) -> None:
    p = problem(dtype=torch.float32, T=2)
    expected, _ = steps(p, stepper, 0, 2, start(p, stepper))
    for name in "kvif":
        x = getattr(p, name).clone()
        x[0, 0] = torch.nan
        h, state = steps(p.but(**{name: x}), stepper, 0, 2, start(p, stepper))
        assert h[0].isnan().all(), name
        assert state.C[0].isnan().any(), name
        assert torch.equal(h[1], expected[1]), name


def test_no_sequences(stepper: Stepper) -> None:
    p = problem(dtype=torch.float32, T=2)
    none = p.but(**{name: getattr(p, name)[:0] for name in "qkvif"})
    h, state = steps(none, stepper, 0, 2, start(p, stepper).gather([]))
    assert h.shape == (0, 2, 2, 7)
    assert state.C.shape == (0, 2, 5, 7)


@pytest.mark.interpreter
@pytest.mark.parametrize("in_place", [False, True])
def test_compile(stepper: Stepper, in_place: bool) -> None:
    torch.compiler.reset()
    p = problem(dtype=torch.float32, T=3)
    state = start(p, stepper)
    inputs = [getattr(p, name).to(stepper.device) for name in "qkvif"]

    def twice(*x: Any) -> tuple[Tensor, tfla.State]:
        _, now = tfla.mlstm_steps(*x, in_place=in_place, backend=stepper.backend)
        return tfla.mlstm_steps(*x[:-1], now, in_place=in_place, backend=stepper.backend)

    with torch.no_grad():
        expected_h, expected = twice(*inputs, state.clone())
        h, found = torch.compile(twice, fullgraph=True, backend="aot_eager")(*inputs, state)
    assert error(h, expected_h) < 1e-6
    assert all(error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))
    assert torch.equal(state.C, found.C) == in_place


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_opcheck(stepper: Stepper, form: str) -> None:
    if stepper.backend == "reference":
        pytest.skip("the reference is traced as it is")
    p = problem(form, dtype=torch.float32, B=1, T=2, Hq=1, H=1)
    x = [getattr(p, name).to(stepper.device) for name in "qkvif"]
    lengths = torch.tensor([1], device=stepper.device) if form == "exp" else None
    args = (*x, *start(p, stepper), lengths, None, 0.5, form, "triton")
    torch.library.opcheck(torch.ops.tfla.steps_.default, args)
    for final_state in (True, False):
        torch.library.opcheck(torch.ops.tfla.steps.default, (*args, final_state))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture_in_a_graph() -> None:
    p, stepper = problem(dtype=torch.float32, T=4), Stepper("triton", "cuda")
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, 4, state)
    inputs = [getattr(p, name)[:, 0].to("cuda") for name in "qkvif"]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        tfla.mlstm_step(*inputs, state.clone())  # compiles
        with torch.cuda.graph(graph):
            now, new = tfla.mlstm_step(*inputs, state, in_place=True)
            state.n.copy_(new.n)
            state.m.copy_(new.m)
    for t in range(4):
        for ours, name in zip(inputs, "qkvif", strict=True):
            ours.copy_(getattr(p, name)[:, t])
        graph.replay()
        assert error(now, h[:, t]) < 1e-6
    assert error(state.C, expected.C) < 1e-6


def one(**change: Any) -> dict[str, Any]:
    p = problem(dtype=torch.float32, T=3)
    return {name: getattr(p, name) for name in "qkvif"} | {"state": p.state.clone()} | change


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"lengths": [1, 2]}, TypeError, ("lengths:", "list", "int64")),
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, ("lengths:", "float32")),
        ({"lengths": torch.tensor([1])}, ValueError, ("lengths:", "(1,)", "(2)")),
        ({"lengths": torch.tensor([1, 4])}, ValueError, ("lengths:", "from 1 to 4", "from 0 to T = 3")),
        ({"lengths": torch.tensor([-1, 2])}, ValueError, ("lengths:", "from -1 to 2", "from 0 to T = 3")),
        ({"lengths": torch.tensor([1, 2]), "return_state": False}, ValueError, ("lengths:", "return_state")),
        ({"in_place": True, "return_state": False}, ValueError, ("in_place:", "return_state")),
        ({"backend": "nobody"}, ValueError, ("backend:", "'nobody'", "'reference'")),
        ({"input_gate": "tanh"}, ValueError, ("input_gate:", "'tanh'")),
        ({"state": None}, TypeError, ("state:", "NoneType")),
    ],
    ids=str,
)
def test_wrong_arguments(change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        tfla.mlstm_steps(**one(**change))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_too_many_steps() -> None:
    p = problem(dtype=torch.float32, T=33)
    with pytest.raises(ValueError, match=r"^v: got T = 33, expected from 1 to 32"):
        tfla.mlstm_steps(p.q, p.k, p.v, p.i, p.f, p.state)


def test_in_place_needs_a_state_that_can_be_overwritten() -> None:
    arguments = one()
    with pytest.raises(ValueError, match=r"^in_place: got True while gradients"):
        tfla.mlstm_steps(**arguments | {"q": arguments["q"].clone().requires_grad_()}, in_place=True)
    wide = arguments["state"]._replace(C=arguments["state"].C.double())
    with pytest.raises(TypeError, match=r"^state.C: got dtype torch.float64, expected torch.float32"):
        tfla.mlstm_steps(**arguments | {"state": wide}, in_place=True)
    one_for_all = arguments["state"]._replace(C=arguments["state"].C[:, :, :1].expand_as(arguments["state"].C))
    with pytest.raises(ValueError, match=r"^state.C: got strides .*, expected no 0"):
        tfla.mlstm_steps(**arguments | {"state": one_for_all}, in_place=True)


def test_training_through_steps(device: str) -> None:
    """With gradients a handful of steps is the recurrence, and what lengths cut off has none."""
    p = problem(dtype=torch.float64, T=3)
    leaves = {name: x.to(device).requires_grad_() for name, x in p.leaves.items() if name in "qkvif"}
    h, state = tfla.mlstm_steps(*leaves.values(), p.state.to(device), lengths=torch.tensor([1, 3], device=device))
    grads = torch.autograd.grad(state.C.sum() + state.n.sum(), [leaves["k"], leaves["v"]], retain_graph=True)
    assert all((g[0, 1:] == 0).all() and (g[0, 0] != 0).any() and (g[1] != 0).any() for g in grads)
    whole = tfla.mlstm(*leaves.values(), initial_state=p.state.to(device))
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), list(leaves.values())) for x in (h, whole)), strict=True):
        assert error(a.cpu(), b.cpu()) < 1e-9


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_gradients_of_the_max_state_reach_states_after_no_steps(device: str, backend: str) -> None:
    """As in states after some steps, they pass through C and n; the returned m is a constant."""
    p = problem(dtype=torch.float64, T=3)
    inputs = [getattr(p, name).detach().to(device) for name in "qkvif"]
    C, n, m = (t.detach().to(device) for t in p.state)
    m.requires_grad_()
    lengths = torch.tensor([0, 3], device=device)

    def total(m: Tensor) -> Tensor:
        """Return a sum over the new true state."""
        new = tfla.mlstm_steps(*inputs, tfla.State(C, n, m), lengths=lengths, backend=backend)[1]
        assert new.n is not None
        assert new.m is not None
        assert not new.m.requires_grad
        return (new.m.exp()[..., None] * (new.C.sum(-1) + new.n)).sum()

    (grad,) = torch.autograd.grad(total(m), m)
    change = torch.randn(m.shape, dtype=m.dtype, device=m.device)
    with torch.no_grad():
        difference = (total(m + 1e-6 * change) - total(m - 1e-6 * change)) / 2e-6
    assert torch.allclose((grad * change).sum(), difference, rtol=1e-6)
    tangent = torch.func.jvp(total, (m.detach(),), (change,))[1]
    assert torch.allclose(tangent, difference, rtol=1e-6)
