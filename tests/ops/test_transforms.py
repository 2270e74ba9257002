"""Transforms of PyTorch over the operator: forward mode, reverse mode, vmap and their compositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import Implementation, Problem, call, check, error, params, problem, recurrence, truth, truth_m
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import tfla

Leaves = dict[str, Tensor]
Values = dict[str, Tensor]

CASES: dict[str, dict[str, Any]] = {
    "exp": {},
    "sigmoid": {"form": "sigmoid"},
    "log-gates": {"form": "plain", "carried": False},
    "normalized": {"form": "normalized"},
    "tiles": {"T": 150, "B": 1},
    "packed": {"lengths": (20, 0, 17)},
    "grouped heads": {"form": "plain", "Hq": 1, "H": 3},
}


def leaves_of(p: Problem, implementation: Implementation) -> Leaves:
    if why := implementation.refusal(p.dtype):
        pytest.skip(why)
    return {name: x.to(implementation.device) for name, x in p.leaves.items()}


def tangents_of(p: Problem, seed: int = 1) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in p.leaves.items()}


def values(h: Tensor, state: tfla.State, m: Tensor | None) -> Values:
    """Outputs by name, states on the scale m."""
    found = {"h": h}
    for name in ("C", "n"):
        if (x := getattr(state, name)) is not None:
            found[name] = x.double()
            if m is not None and state.m is not None:
                weight = torch.exp(state.m.detach().double() - m.to(h.device))
                found[name] = found[name] * weight.reshape(*weight.shape, *[1] * (x.dim() - 2))
    return found


def of_library(p: Problem, implementation: Implementation) -> Callable[[Leaves], Values]:
    m = truth_m(p)
    return lambda leaves: values(*call(p, leaves, **implementation.options), m)


def tangents_of_truth(p: Problem, tangents: Leaves) -> Values:
    exact = {name: x.double() for name, x in p.leaves.items()}
    of_inputs = {name: x.double() for name, x in tangents.items()}
    m = truth_m(p)
    return jvp(lambda leaves: values(*recurrence(p, leaves), m), (exact,), (of_inputs,))[1]


def by_func(fn: Callable[[Leaves], Values], leaves: Leaves, tangents: Leaves) -> tuple[Values, Values]:
    return jvp(fn, (leaves,), (tangents,))


def by_dual_tensors(fn: Callable[[Leaves], Values], leaves: Leaves, tangents: Leaves) -> tuple[Values, Values]:
    with fwAD.dual_level():
        out = fn({name: fwAD.make_dual(x, tangents[name]) for name, x in leaves.items()})
        found = {name: fwAD.unpack_dual(x) for name, x in out.items()}
    return {name: x.primal for name, x in found.items()}, {name: x.tangent for name, x in found.items()}


def compiled(fn: Callable[[Leaves], Values], leaves: Leaves, tangents: Leaves) -> tuple[Values, Values]:
    torch.compiler.reset()
    whole = torch.compile(lambda x, t: jvp(fn, (x,), (t,)), fullgraph=True, backend="aot_eager")
    return whole(leaves, tangents)


def jvp_of(
    p: Problem, implementation: Implementation, by: Callable[..., tuple[Values, Values]], tangents: Leaves | None = None
) -> tuple[Values, Values]:
    leaves, tangents = leaves_of(p, implementation), tangents_of(p) if tangents is None else tangents
    return by(
        of_library(p, implementation), leaves, {name: x.to(implementation.device) for name, x in tangents.items()}
    )


def check_tangents(found: Values, expected: Values, dtype: torch.dtype) -> None:
    check({name: x.cpu().to(dtype) if name == "h" else x.cpu() for name, x in found.items()}, expected, dtype)


@pytest.mark.parametrize("by", [by_func, by_dual_tensors])
@pytest.mark.parametrize("case", params(CASES, {"packed", "grouped heads"}))
def test_tangents_are_those_of_the_recurrence(implementation: Implementation, case: dict[str, Any], by: Any) -> None:
    p = problem(dtype=implementation.widest, **case)
    primal, found = jvp_of(p, implementation, by)
    check_tangents(found, tangents_of_truth(p, tangents_of(p)), p.dtype)
    check({name: x.detach().cpu() for name, x in primal.items()}, {name: truth(p)[name] for name in primal}, p.dtype)


@pytest.mark.parametrize("case", [{"T": 70, "B": 1}, {"form": "sigmoid", "Hq": 1}], ids=["tiles", "grouped"])
def test_tangents_in_a_compiled_function(implementation: Implementation, case: dict[str, Any]) -> None:
    p = problem(dtype=implementation.widest, **case)
    _, found = jvp_of(p, implementation, compiled)
    check_tangents(found, tangents_of_truth(p, tangents_of(p)), p.dtype)


def test_tangents_of_packed_sequences_in_a_compiled_function(implementation: Implementation) -> None:
    """Lengths are read, for which the graph breaks."""
    p = problem(dtype=implementation.widest, lengths=(20, 0, 17))

    def broken_up(fn: Any, leaves: Leaves, tangents: Leaves) -> Any:
        torch.compiler.reset()
        return torch.compile(lambda x, t: jvp(fn, (x,), (t,)), backend="aot_eager")(leaves, tangents)

    _, found = jvp_of(p, implementation, broken_up)
    check_tangents(found, tangents_of_truth(p, tangents_of(p)), p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tangents_of_inputs_of_fewer_bits(implementation: Implementation, dtype: torch.dtype) -> None:
    """Sums of tangents are float32: only inputs and results are rounded."""
    p = problem(dtype=dtype, T=150, B=1, carried=False)
    _, found = jvp_of(p, implementation, by_func)
    assert found["h"].dtype == dtype
    check_tangents(found, tangents_of_truth(p, tangents_of(p)), dtype)


@pytest.mark.parametrize(("form", "f_mean"), [("exp", 8.0), ("sigmoid", 14.0)])
def test_tangents_over_a_long_memory(form: str, f_mean: float) -> None:
    """Sums of thousands of tangents of log-gates, some of which close: float32 sees none of them as a difference."""
    implementation = Implementation("chunkwise", "segmented", "cpu")
    p = problem(form, dtype=torch.float32, T=2000, B=1, H=1, Hq=1, f_mean=f_mean)
    f = p.f.clone()
    f[:, 700:1500:200] = -300.0
    p = p.but(f=f)
    only = {name: x if name in ("f", "i", "m0") else torch.zeros_like(x) for name, x in tangents_of(p).items()}
    _, found = jvp_of(p, implementation, by_func, only)
    check_tangents(found, tangents_of_truth(p, only), torch.float32)


@pytest.mark.parametrize("name", ["q", "k", "v", "i", "f", "C0", "n0", "m0"])
def test_tangents_of_one_input(name: str) -> None:
    implementation = Implementation("chunkwise", "segmented", "cpu")
    p = problem()
    one = {other: x if other == name else torch.zeros_like(x) for other, x in tangents_of(p).items()}
    leaves, m = leaves_of(p, implementation), truth_m(p)
    with fwAD.dual_level():
        dual = {**leaves, name: fwAD.make_dual(leaves[name], one[name])}
        out = {part: fwAD.unpack_dual(x) for part, x in values(*call(p, dual, **implementation.options), m).items()}
    found = {part: torch.zeros_like(x.primal) if x.tangent is None else x.tangent for part, x in out.items()}
    check_tangents(found, tangents_of_truth(p, one), p.dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("normalizer_grad", [True, False])
def test_forward_and_reverse_mode_agree(implementation: Implementation, normalizer_grad: bool) -> None:
    """<jvp(t), w> = <t, vjp(w)>, whatever the denominator's gradient is."""
    p = problem(dtype=implementation.widest).but(normalizer_grad=normalizer_grad)
    leaves, tangents = (
        leaves_of(p, implementation),
        {name: x.to(implementation.device) for name, x in tangents_of(p).items()},
    )
    h, found = jvp(lambda x: call(p, x, **implementation.options)[0], (leaves,), (tangents,))
    cotangent = p.dh.to(h)
    (gradients,) = vjp(lambda x: call(p, x, **implementation.options)[0], leaves)[1](cotangent)
    forward = (found * cotangent).sum().double()
    reverse = sum((gradients[name].double() * t).sum() for name, t in tangents.items())
    assert abs(forward - reverse) <= 1e-5 * (found.norm() * cotangent.norm())


def test_the_paper_s_convention_holds_the_denominator_in_forward_mode() -> None:
    implementation = Implementation("chunkwise", "segmented", "cpu")
    exact = problem()
    paper = exact.but(normalizer_grad=False)
    _, found = jvp_of(paper, implementation, by_func)
    check_tangents(found, tangents_of_truth(paper, tangents_of(paper)), paper.dtype)
    assert error(found["h"], tangents_of_truth(exact, tangents_of(exact))["h"]) > 0.01


def test_a_returned_m_has_no_tangent(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest)
    leaves, tangents = leaves_of(p, implementation), tangents_of(p)
    with fwAD.dual_level():
        _, state = call(
            p, {n: fwAD.make_dual(x, tangents[n].to(x)) for n, x in leaves.items()}, **implementation.options
        )
        assert fwAD.unpack_dual(state.m).tangent is None
        assert fwAD.unpack_dual(state.C).tangent is not None


@pytest.mark.interpreter
def test_tangents_after_calls_without(implementation: Implementation) -> None:
    """A call in forward mode is not taken for one like it that has no tangents, nor the other way round."""
    p = problem(dtype=implementation.widest, carried=False)
    leaves, tangents = leaves_of(p, implementation), {n: x.to(implementation.device) for n, x in tangents_of(p).items()}
    plain = [call(p, leaves, **implementation.options)[0] for _ in range(3)]
    with fwAD.dual_level():
        without = call(p, leaves, **implementation.options)[0]
        h = call(p, {n: fwAD.make_dual(x, tangents[n]) for n, x in leaves.items()}, **implementation.options)[0]
        assert fwAD.unpack_dual(h).tangent is not None
    assert all(torch.equal(x, plain[0]) for x in (*plain, without, call(p, leaves, **implementation.options)[0]))


STEPS: dict[str, Callable[[Leaves, tfla.State], tuple[Tensor, tfla.State]]] = {
    "mlstm_step": lambda x, s: tfla.mlstm_step(*(x[n][:, 0] for n in "qkvif"), s),
    "mlstm_steps": lambda x, s: tfla.mlstm_steps(*(x[n] for n in "qkvif"), s),
    "lengths": lambda x, s: tfla.mlstm_steps(*(x[n] for n in "qkvif"), s, lengths=torch.tensor([2, 3]).to(s.C.device)),
    "sigmoid": lambda x, s: tfla.mlstm_step(*(x[n][:, 0] for n in "qkvif"), tfla.State(s.C), input_gate="sigmoid"),
    "linear_attention_steps": lambda x, s: tfla.linear_attention_steps(
        x["q"], x["k"], x["v"], -x["f"].abs(), s, x["i"], normalize=True
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("of", STEPS.values(), ids=STEPS.keys())
def test_tangents_of_steps(device: str, of: Any) -> None:
    """Beside finite differences in float64, of the true state exp(m) C; in float32 after calls without tangents."""
    p = problem(T=3)
    tangents = tangents_of(p)

    def outputs(x: Leaves) -> tuple[Tensor, Tensor]:
        h, state = of(x, tfla.State(x["C0"], x["n0"], x["m0"]))
        if state.m is None:
            return h, state.C
        return h, state.m.exp()[..., None, None] * state.C

    def moved(by: float) -> tuple[Tensor, Tensor]:
        return outputs({name: x + by * tangents[name] for name, x in p.leaves.items()})

    expected = [(a - b) / 2e-5 for a, b in zip(moved(1e-5), moved(-1e-5), strict=True)]
    found = jvp(outputs, (dict(p.leaves),), (tangents,))[1]
    assert all(error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))
    rounded = {name: x.float().to(device) for name, x in p.leaves.items()}
    with torch.no_grad():
        for _ in range(2):
            outputs(rounded)
        found = jvp(outputs, (rounded,), ({name: t.float().to(device) for name, t in tangents.items()},))[1]
    assert all(error(a.cpu(), b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_steps_in_place_are_refused_in_forward_mode(device: str) -> None:
    p = problem(dtype=torch.float32, T=1)
    x = [getattr(p, name)[:, 0].to(device) for name in "qkvif"]
    state = p.state.to(device).clone()
    with torch.no_grad(), fwAD.dual_level():
        dual = fwAD.make_dual(x[0], torch.ones_like(x[0]))
        with pytest.raises(ValueError, match="in_place: got True while"):
            tfla.mlstm_step(dual, *x[1:], state, in_place=True)


def scalar(p: Problem, implementation: Implementation, name: str = "q") -> Callable[[Tensor], Tensor]:
    """A number that depends on one input, with second derivatives."""
    leaves = leaves_of(p, implementation)

    def value(x: Tensor) -> Tensor:
        h, state = call(p, {**leaves, name: x}, **implementation.options)
        return (h * p.dh.to(h)).sin().sum() + state.C.square().mean()

    return value


def scalar_of_truth(p: Problem, name: str) -> Callable[[Tensor], Tensor]:
    leaves = {other: x.double() for other, x in p.leaves.items()}

    def value(x: Tensor) -> Tensor:
        h, state = recurrence(p, {**leaves, name: x})
        return (h * p.dh.double()).sin().sum() + state.C.square().mean()

    return value


SMALL: dict[str, Any] = {"T": 5, "B": 2, "H": 1, "Hq": 1, "K": 2, "V": 2}


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_reverse_mode(implementation: Implementation, form: str) -> None:
    """grad, vjp and jacrev are what autograd gives, on the backend's own kernels."""
    p = problem(form, dtype=implementation.widest, **{**SMALL, "T": 3, "B": 1})
    value, q = scalar(p, implementation), leaves_of(p, implementation)["q"]
    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(x), x)
    assert torch.equal(grad(value)(q), expected)
    assert torch.equal(vjp(value, q)[1](torch.ones((), dtype=p.dtype, device=q.device))[0], expected)
    assert error(jacrev(value)(q), expected) < 1e-6

    def h(x: Tensor) -> Tensor:
        return call(p, {**leaves_of(p, implementation), "q": x}, **implementation.options)[0]

    (pulled_back,) = vjp(h, q)[1](p.dh.to(q))
    assert error(torch.einsum("abcdefgh,abcd->efgh", jacrev(h)(q), p.dh.to(q)), pulled_back) < 1e-6


@pytest.mark.parametrize("form", ["exp", "sigmoid", "plain"])
@pytest.mark.parametrize("name", ["q", "f", "C0"])
def test_jacobians_and_hessians(implementation: Implementation, form: str, name: str) -> None:
    p = problem(form, dtype=implementation.widest, **SMALL)
    value, x = scalar(p, implementation, name), leaves_of(p, implementation)[name]
    exact = scalar_of_truth(p, name)
    tolerance = 1e-9 if p.dtype == torch.float64 else 1e-4
    assert hessian(exact)(x.cpu().double()).norm() > 0.1
    first, second = jacrev(exact)(x.cpu().double()), hessian(exact)(x.cpu().double())
    assert error(jacfwd(value)(x).cpu(), first) < tolerance
    for found in (hessian(value)(x), jacrev(jacrev(value))(x), jacrev(jacfwd(value))(x), jacfwd(jacfwd(value))(x)):
        assert error(found.cpu(), second) < tolerance


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [None, (3, 0, 2)], ids=["batch", "packed"])
def test_double_backward(implementation: Implementation, lengths: tuple[int, ...] | None) -> None:
    """Gradients of the norm of a gradient, past the dispatcher and under torch.func."""
    p = problem(dtype=implementation.widest, **{**SMALL, "lengths": lengths})
    leaves = {name: x.clone().requires_grad_() for name, x in leaves_of(p, implementation).items()}

    def penalty(outputs: tuple[Tensor, tfla.State], of: Leaves) -> dict[str, Tensor]:
        h, state = outputs
        value = (h * p.dh.to(h)).sum() + state.C.sin().sum() + (state.n.sin().sum() if state.n is not None else 0.0)
        grads = torch.autograd.grad(value, list(of.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(of.values()))
        return {name: g.detach().cpu() for name, g in zip(of, second, strict=True)}

    found = penalty(call(p, leaves, **implementation.options), leaves)
    wide = {name: x.detach().cpu().double().requires_grad_() for name, x in leaves.items()}
    h, state = recurrence(p, wide)
    # As the operator returns it: on the scale of its own m, which is that of the truth but for rounding.
    expected = penalty((h, state), wide)
    tolerance = 1e-9 if p.dtype == torch.float64 else 1e-4
    assert all(error(found[name], expected[name]) < tolerance for name in found), {
        name: error(found[name], expected[name]) for name in found
    }


def test_gradgradcheck() -> None:
    implementation = Implementation("chunkwise", "segmented", "cpu")
    p = problem("exp", **SMALL)
    leaves = {name: x.clone().requires_grad_() for name, x in p.leaves.items() if name != "m0"}

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        return call(p, {**p.leaves, **dict(zip(leaves, tensors, strict=True))}, **implementation.options)[0]

    assert torch.autograd.gradgradcheck(outputs, tuple(leaves.values()))
    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), check_forward_ad=True, check_backward_ad=False)


def test_transforms_of_a_compiled_function(implementation: Implementation) -> None:
    """Dual tensors are compiled for; PyTorch runs a function uncompiled that torch.func transforms from outside."""
    torch.compiler.reset()
    p = problem(dtype=implementation.widest, **SMALL)
    q, tangent = leaves_of(p, implementation)["q"], tangents_of(p)["q"].to(implementation.device)

    def h(x: Tensor) -> Tensor:
        return call(p, {**leaves_of(p, implementation), "q": x}, **implementation.options)[0]

    expected = jvp(h, (q,), (tangent,))[1]
    compiled_h = torch.compile(h, backend="aot_eager")
    assert torch.equal(compiled_h(q), h(q))
    with fwAD.dual_level():
        assert error(fwAD.unpack_dual(compiled_h(fwAD.make_dual(q, tangent))).tangent, expected) < 1e-6
    assert error(jvp(compiled_h, (q,), (tangent,))[1], expected) < 1e-6
    assert error(grad(lambda x: compiled_h(x).sum())(q), grad(lambda x: h(x).sum())(q)) < 1e-6


def test_forward_mode_of_a_pullback(implementation: Implementation) -> None:
    """A backward is linear in the cotangent: its tangent is the pullback of the cotangent's."""
    p = problem(dtype=implementation.widest, **SMALL)
    leaves = leaves_of(p, implementation)
    h, pull_back = vjp(lambda q: call(p, {**leaves, "q": q}, **implementation.options)[0], leaves["q"])
    direction = torch.randn_like(h)
    (found,) = jvp(lambda c: pull_back(c)[0], (p.dh.to(h),), (direction,))[1:]
    assert error(found, pull_back(direction)[0]) < 1e-5


def test_linearize(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest, **SMALL)
    leaves = leaves_of(p, implementation)
    t = torch.randn_like(leaves["f"])

    def of_f(f: Tensor) -> Tensor:
        return call(p, {**leaves, "f": f}, **implementation.options)[0]

    h, push_forward = linearize(of_f, leaves["f"])
    expected = jvp(of_f, (leaves["f"],), (t,))
    assert error(h, expected[0]) < 1e-6
    assert error(push_forward(t), expected[1]) < 1e-6


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [{"T": 9, "B": 1}, {"form": "plain", "lengths": (5, 0, 4)}], ids=["batch", "packed"])
def test_vmap(implementation: Implementation, case: dict[str, Any]) -> None:
    """Over any dimension of some inputs, the others being shared; with gradients inside and outside."""
    p = problem(dtype=implementation.widest, H=1, Hq=1, **case)
    leaves = leaves_of(p, implementation)
    qs = torch.stack([leaves["q"], 2 * leaves["q"], -leaves["q"]], 3)
    fs = torch.stack([leaves["f"], leaves["f"] - 1, leaves["f"] - 2])

    def outputs(q: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        h, state = call(p, {**leaves, "q": q, "f": f}, **implementation.options)
        return h, state.C

    def value(q: Tensor, f: Tensor) -> Tensor:
        return sum(x.sin().sum() for x in outputs(q, f))

    each = [(qs[:, :, :, j].contiguous(), fs[j]) for j in range(3)]
    expected = [torch.stack(x) for x in zip(*(outputs(*x) for x in each), strict=True)]
    found = vmap(outputs, in_dims=(3, 0))(qs, fs)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))
    gradients = torch.stack([grad(value)(*x) for x in each])
    assert error(vmap(grad(value), in_dims=(3, 0))(qs, fs), gradients) < 1e-6
    outside = grad(lambda q: vmap(value, in_dims=(3, 0))(q, fs).sum())(qs)
    assert error(outside.movedim(3, 0), gradients) < 1e-6
    x = qs.clone().requires_grad_()
    vmap(value, in_dims=(3, 0))(x, fs).sum().backward()
    assert error(x.grad.movedim(3, 0), gradients) < 1e-6


def test_batched_cotangents(implementation: Implementation) -> None:
    """`is_grads_batched` maps over cotangents by a vmap that is older than that of torch.func."""
    p = problem(dtype=implementation.widest, T=9)
    leaves = {name: x.clone().requires_grad_() for name, x in leaves_of(p, implementation).items()}
    h, state = call(p, leaves, **implementation.options)
    given = [torch.stack([t.sin(), t.cos()]).detach() for t in (h, state.C)]
    inputs = [*leaves.values()]
    found = torch.autograd.grad((h, state.C), inputs, given, is_grads_batched=True, retain_graph=True)
    for j in range(2):
        expected = torch.autograd.grad((h, state.C), inputs, [t[j] for t in given], retain_graph=True)
        assert all(error(a[j], b) < 1e-6 for a, b in zip(found, expected, strict=True))


def test_vmap_over_offsets_of_packed_sequences() -> None:
    p = problem(lengths=(20, 0, 17))
    offsets = torch.tensor([[0, 20, 20, 37], [0, 1, 30, 37]])

    def outputs(at: Tensor) -> Tensor:
        return call(p.but(cu_seqlens=at), p.leaves, backend="chunkwise")[0]

    assert all(torch.equal(a, outputs(at)) for a, at in zip(vmap(outputs)(offsets), offsets, strict=True))


def test_vmap_of_steps(device: str) -> None:
    p = problem(dtype=torch.float32, T=1, B=3)
    x = [getattr(p, name)[:, 0].to(device) for name in "qkvif"]
    state = p.state.to(device)
    with torch.no_grad():
        expected = tfla.mlstm_step(*x, state)

        def one(*t: Tensor) -> Any:
            h, new = tfla.mlstm_step(*(a[None] for a in t[:5]), tfla.State(*(a[None] for a in t[5:])))
            return h[0], new.C[0], new.n[0]

        found = vmap(one)(*x, *state)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, (expected[0], *expected[1][:2]), strict=True))


@pytest.mark.parametrize("transform", [grad, hessian, vmap], ids=["grad", "hessian", "vmap"])
def test_transforms_in_a_compiled_function(implementation: Implementation, transform: Any) -> None:
    torch.compiler.reset()
    p = problem(dtype=implementation.widest, **SMALL)
    value, q = scalar(p, implementation), leaves_of(p, implementation)["q"]
    given = torch.stack([q, 2 * q]) if transform is vmap else q
    found = torch.compile(transform(value), fullgraph=True, backend="aot_eager")(given)
    assert error(found, transform(value)(given)) < 1e-6
