"""Decoding steps of the delta rule without gradients, by the kernels of backends and by the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error, params
from delta_cases import DeltaProblem, delta_problem, options, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from steppers import Stepper, steppers
from torch import Tensor

import tfla
from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import DeltaStepInputs, DeltaStepSpec
from tfla.backends.gpu import replay

CUTS = (0, 1, 4, 7)
MODELS = {model: model for model in ("deltanet", "gdn", "kda", "gla", "comba", "gdn2", "before", "read")}
ACTIVATIONS = ("none", "softplus", "sigmoid")
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


def steps(
    p: DeltaProblem, stepper: Stepper, a: int, b: int, state: tfla.State, **changed: Any
) -> tuple[Tensor, tfla.State]:
    """Steps a to b of the problem."""
    x = {name: t[:, a:b].to(stepper.device) for name, t in p.leaves.items() if name != "C"}
    more = {"scale": p.scale, "backend": stepper.backend, **changed}
    with torch.no_grad():
        if not p.correct:
            return tfla.linear_attention_steps(x["q"], x["k"], x["v"], x["log_f"], state, **more)
        more |= options(log_f=x.get("log_f"), read_key=x.get("read_key"), read_before_decay=p.read_before_decay)
        return tfla.delta_rule_steps(x["q"], x["k"], x["v"], x["beta"], state, **more)


def start(p: DeltaProblem, stepper: Stepper) -> tfla.State:
    return tfla.State(p.leaves["C"].to(stepper.device).clone())


def in_pieces(p: DeltaProblem, stepper: Stepper, cuts: tuple[int, ...] = CUTS) -> tuple[Tensor, tfla.State]:
    state, hs = start(p, stepper), []
    for a, b in itertools.pairwise(cuts):
        h, state = steps(p, stepper, a, b, state)
        hs.append(h)
    return torch.cat(hs, 1), state


def check_truth(p: DeltaProblem, h: Tensor, state: tfla.State) -> None:
    exact = truth(p)
    assert h.dtype == p.x.v.dtype
    assert error(h.cpu(), exact["h"]) < TOLERANCE[p.x.q.dtype]
    assert error(state.C.cpu(), exact["C"]) < max(TOLERANCE[torch.float32], TOLERANCE[p.x.q.dtype] / 10)


@pytest.mark.parametrize("model", params(MODELS, MODELS))
def test_every_model(stepper: Stepper, model: str) -> None:
    p = delta_problem(model, T=7, dtype=torch.float32)
    check_truth(p, *in_pieces(p, stepper))


@pytest.mark.parametrize("dtype", params({str(d): d for d in TOLERANCE}, {"torch.float16"}))
def test_every_dtype(stepper: Stepper, dtype: torch.dtype) -> None:
    stepper.check_takes(dtype, delta_rule=True)
    p = delta_problem("kda", T=7, dtype=dtype)
    check_truth(p, *in_pieces(p, stepper))


@pytest.mark.parametrize("shape", params(SHAPES, {"grouped heads", "odd", "tall"}))
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_any_shape(stepper: Stepper, model: str, shape: dict[str, Any]) -> None:
    p = delta_problem(model, T=7, dtype=torch.float32, **shape)
    check_truth(p, *in_pieces(p, stepper))


@pytest.mark.interpreter
@settings(max_examples=6)
@given(
    st.sampled_from(sorted(MODELS)), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.sampled_from(["long", "short", "half", "resets"]),
)  # fmt: skip
@pytest.mark.parametrize("stepper", steppers())
def test_any_problem(stepper: Stepper, model: str, T: int, K: int, V: int, heads: tuple[int, int], gates: str) -> None:
    p = delta_problem(model, B=1, T=T, K=K, V=V, Hq=heads[0], H=heads[1], gates=gates, dtype=torch.float32)
    check_truth(p, *steps(p, stepper, 0, T, start(p, stepper)))


@pytest.mark.interpreter
@pytest.mark.parametrize("model", ["gdn", "kda"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_inside_the_step(stepper: Stepper, model: str, activation: str) -> None:
    """They are those of the whole sequence, which PyTorch computes in float64; no gate is close to closed."""
    p = delta_problem(model, T=3, H=4, K=5, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    raw = dict(p.leaves) | {"log_f": torch.randn(p.leaves["log_f"].shape, generator=draw, dtype=torch.float64)}
    more: dict[str, Any] = {"normalize_qk": True, "beta_activation": "2sigmoid" if model == "gdn" else "sigmoid"}
    if activation == "none":
        raw["log_f"] = -raw["log_f"].abs()
    else:
        more |= {"gate_activation": activation, "A_log": torch.randn(4, generator=draw, dtype=torch.float64)}
        shape = (4, 5) if model == "kda" and activation == "softplus" else (4,)
        more["dt_bias"] = torch.randn(shape, generator=draw, dtype=torch.float64)
        more |= {"lower_bound": -5.0} if activation == "sigmoid" else {}
    exact, last = tfla.delta_rule(
        *(raw[n] for n in ("q", "k", "v", "beta", "log_f")), initial_state=tfla.State(raw["C"]), return_state=True,
        backend="reference", **more,
    )  # fmt: skip

    def low(t: Any) -> Any:
        return t.float().to(stepper.device) if isinstance(t, Tensor) else t

    x = {name: low(t) for name, t in raw.items()}
    more = {name: low(t) for name, t in more.items()}
    state = tfla.State(x.pop("C"))
    with torch.no_grad():
        h, found = tfla.delta_rule_steps(
            x["q"], x["k"], x["v"], x["beta"], state, x["log_f"], backend=stepper.backend, **more
        )
    assert error(h.cpu(), exact) < TOLERANCE[torch.float32]
    assert error(found.C.cpu(), last.C) < TOLERANCE[torch.float32]


@pytest.mark.interpreter
@pytest.mark.parametrize("model", ["gdn", "gla"])
def test_the_state_after_as_many_steps_as_are_kept(stepper: Stepper, model: str) -> None:
    """Speculative decoding: outputs of all proposed tokens, the state after those that are kept."""
    p = delta_problem(model, dtype=torch.float32, B=5, T=4, Hq=1, H=1)
    kept = torch.tensor([0, 1, 2, 3, 4], device=stepper.device)
    state = start(p, stepper)
    before = state.clone()
    whole, last = steps(p, stepper, 0, 4, state)
    assert torch.equal(steps(p, stepper, 0, 4, state, return_state=False), whole)
    assert torch.equal(state.C, before.C)
    for lengths in (kept, kept.int()):
        h, found = steps(p, stepper, 0, 4, state, lengths=lengths)
        assert torch.equal(h, whole)
    for row, steps_kept in enumerate(kept.tolist()):
        expected = state if steps_kept == 0 else steps(p, stepper, 0, steps_kept, state)[1]
        assert error(found.C[row].cpu(), expected.C[row].cpu()) < 1e-6
    assert torch.equal(found.C[4], last.C[4])
    own = state.clone()
    _, written = steps(p, stepper, 0, 4, own, lengths=kept, in_place=True)
    assert written.C is own.C
    assert torch.equal(own.C, found.C)


@pytest.mark.interpreter
def test_lengths_that_no_host_reads_are_bounded(stepper: Stepper) -> None:
    """The kernel is called directly, since on a CPU, where Triton's interpreter runs, the operator refuses them."""
    if stepper.backend == "reference":
        pytest.skip("compares them with each step")
    p = delta_problem("gdn", dtype=torch.float32, B=5, T=4, Hq=1, H=1)
    x = {name: t.to(stepper.device) for name, t in p.leaves.items()}

    def run(lengths: list[int]) -> tuple[Tensor, Tensor]:
        given = DeltaStepInputs(
            x["q"], x["k"], x["v"], x["beta"], x["log_f"], None, None, None, x["C"],
            torch.tensor(lengths, device=stepper.device),
        )  # fmt: skip
        return DELTA_BACKENDS[stepper.backend].steps(given, DeltaStepSpec(0.5, True, False, True), None)

    found, expected = run([-3, -(2**40), 2, 9, 2**40]), run([0, 0, 2, 4, 4])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("model", ["gdn", "kda"])
@pytest.mark.parametrize("T", [1, 3])
def test_in_place(stepper: Stepper, model: str, T: int) -> None:
    p = delta_problem(model, dtype=torch.float32, T=3)
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, T, state)
    own = state.clone()
    again, found = steps(p, stepper, 0, T, own, in_place=True)
    assert found.C is own.C
    assert torch.equal(again, h)
    assert torch.equal(own.C, expected.C)


@pytest.mark.parametrize("kept", params({"float16": torch.float16, "bfloat16": torch.bfloat16}, {"float16"}))
def test_a_state_of_16_bits_stays_so(stepper: Stepper, kept: torch.dtype) -> None:
    """The arithmetic is that of float32, and the result is rounded once."""
    stepper.check_takes(torch.float32, kept, delta_rule=True)
    p = delta_problem("kda", dtype=torch.float32, T=3)
    low = tfla.State(start(p, stepper).C.to(kept))
    h, expected = steps(p, stepper, 0, 3, tfla.State(low.C.float()))
    found_h, found = steps(p, stepper, 0, 3, low)
    assert error(found_h, h) < 1e-6
    assert found.C.dtype == kept
    assert error(found.C, expected.C) <= 1.01 * error(expected.C.to(kept), expected.C)
    steps(p, stepper, 0, 3, low, in_place=True)
    assert torch.equal(low.C, found.C)


@pytest.mark.interpreter
def test_any_strides(stepper: Stepper) -> None:
    p = delta_problem("gdn2", dtype=torch.float32, T=3, H=4, Hq=2)
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, 3, state)
    x = p.x._replace(**{n: t.transpose(-1, 1).contiguous().transpose(-1, 1) for n, t in p.leaves.items() if n != "C"})
    other = DeltaProblem(p.model, x, p.dh, p.dC, p.scale)
    strided = tfla.State(state.C.transpose(0, 1).contiguous().transpose(0, 1))
    for own in (strided, tfla.State(state.C.transpose(2, 3).contiguous().transpose(2, 3))):
        found_h, found = steps(other, stepper, 0, 3, own)
        assert error(found_h, h) < 1e-6
        assert error(found.C, expected.C) < 1e-6
        assert steps(other, stepper, 0, 3, own, in_place=True)[1].C is own.C
        assert error(own.C, expected.C) < 1e-6


@pytest.mark.interpreter
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, -1e4])
def test_extreme_gates(stepper: Stepper, value: float) -> None:
    p = delta_problem("gdn", dtype=torch.float32, T=3)
    log_f = p.leaves["log_f"].clone()
    log_f[:, 1] = value
    changed = DeltaProblem(p.model, p.x._replace(log_f=log_f), p.dh, p.dC, p.scale)
    h, state = in_pieces(changed, stepper, (0, 2, 3))
    if value > 0:  # the state grows without bound
        assert not h[:, 1:].isfinite().any()
        return
    finite = p.x._replace(log_f=log_f.clamp(min=-1e5))
    check_truth(DeltaProblem(p.model, finite, p.dh, p.dC, p.scale), h, state)


@pytest.mark.interpreter
def test_nan_stays_in_its_sequence(stepper: Stepper) -> None:
    p = delta_problem("gdn", dtype=torch.float32, T=2)
    expected, _ = steps(p, stepper, 0, 2, start(p, stepper))
    for name in ("k", "v", "beta", "log_f"):
        t = p.leaves[name].clone()
        t[0, 0] = torch.nan
        changed = DeltaProblem(p.model, p.x._replace(**{name: t}), p.dh, p.dC, p.scale)
        h, state = steps(changed, stepper, 0, 2, start(p, stepper))
        assert h[0].isnan().all(), name
        assert state.C[0].isnan().any(), name
        assert torch.equal(h[1], expected[1]), name


@pytest.mark.interpreter
def test_no_sequences(stepper: Stepper) -> None:
    p = delta_problem("gdn", dtype=torch.float32, T=2)
    x = p.x._replace(**{n: t[:0] for n, t in p.leaves.items()})
    h, state = steps(DeltaProblem(p.model, x, p.dh, p.dC, p.scale), stepper, 0, 2, tfla.State(start(p, stepper).C[:0]))
    assert h.shape == (0, 2, 2, 6)
    assert state.C.shape == (0, 2, 8, 6)


@pytest.mark.interpreter
def test_launches_are_replayed(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of a signature goes from the operator straight to the recorded launches."""
    if stepper.backend == "reference":
        pytest.skip("it has no launches")
    p = delta_problem("kda", dtype=torch.float32, T=2, K=9, V=11)
    h, expected = steps(p, stepper, 0, 1, start(p, stepper), in_place=True)
    monkeypatch.setattr(DELTA_BACKENDS[stepper.backend], "steps", None)
    monkeypatch.setattr(replay, "LaunchRecorder", None)
    again, found = steps(p, stepper, 0, 1, start(p, stepper), in_place=True)
    assert torch.equal(again, h)
    assert torch.equal(found.C, expected.C)


@pytest.mark.interpreter
@pytest.mark.parametrize("in_place", [False, True])
def test_compile(stepper: Stepper, in_place: bool) -> None:
    torch.compiler.reset()
    p = delta_problem("kda", dtype=torch.float32, T=3)
    state = start(p, stepper)
    inputs = [p.leaves[name].to(stepper.device) for name in ("q", "k", "v", "beta", "log_f")]

    def twice(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_f: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        now = tfla.State(C)
        _, now = tfla.delta_rule_steps(q, k, v, beta, now, log_f, in_place=in_place, backend=stepper.backend)
        h, now = tfla.delta_rule_steps(q, k, v, beta, now, log_f, in_place=in_place, backend=stepper.backend)
        return h, now.C

    with torch.no_grad():
        expected_h, expected = twice(*inputs, state.C.clone())
        h, found = torch.compile(twice, fullgraph=True, backend="aot_eager")(*inputs, state.C)
    assert error(h, expected_h) < 1e-6
    assert error(found, expected) < 1e-6
    assert torch.equal(state.C, found) == in_place


@pytest.mark.interpreter
@pytest.mark.parametrize("model", ["gdn", "gla"])
def test_opcheck(stepper: Stepper, model: str) -> None:
    if stepper.backend == "reference":
        pytest.skip("the reference is traced as it is")
    p = delta_problem(model, dtype=torch.float32, B=1, T=2, Hq=1, H=1)
    x = [None if t is None else t.to(stepper.device) for t in p.x[:9]]
    lengths = torch.tensor([1], device=stepper.device) if model == "gdn" else None
    args = (*x, lengths, None, 0.5, p.correct, False, "triton")
    torch.library.opcheck(torch.ops.tfla.delta_steps_.default, args)
    for final_state in (True, False):
        torch.library.opcheck(torch.ops.tfla.delta_steps.default, (*args, final_state))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture_in_a_graph() -> None:
    p, stepper = delta_problem("kda", dtype=torch.float32, T=4), Stepper("triton", "cuda")
    state = start(p, stepper)
    h, expected = steps(p, stepper, 0, 4, state)
    names = ("q", "k", "v", "beta", "log_f")
    inputs = {name: p.leaves[name][:, 0].to("cuda") for name in names}

    def step(state: tfla.State) -> Tensor:
        q, k, v, beta, log_f = inputs.values()
        return tfla.delta_rule_step(q, k, v, beta, state, log_f, scale=p.scale, in_place=True)[0]

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        step(state.clone())  # compiles
        with torch.cuda.graph(graph):
            now = step(state)
    for t in range(4):
        for name in names:
            inputs[name].copy_(p.leaves[name][:, t])
        graph.replay()
        assert error(now, h[:, t]) < 1e-6
    assert error(state.C, expected.C) < 1e-6


def test_a_named_backend_without_a_kernel_leaves_the_choice_open() -> None:
    p = delta_problem("gdn", dtype=torch.float64, T=2)
    stepper = Stepper("triton", "cpu")  # float64 has no kernel
    check_truth(p, *steps(p, stepper, 0, 2, start(p, stepper)))


def one(**change: Any) -> dict[str, Any]:
    p = delta_problem("gdn", dtype=torch.float32, T=3)
    return {name: t for name, t in p.leaves.items() if name != "C"} | {"state": tfla.State(p.leaves["C"])} | change


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"lengths": [1, 2]}, TypeError, ("lengths:", "list", "int64")),
        ({"lengths": torch.tensor([1, 4])}, ValueError, ("lengths:", "from 1 to 4", "from 0 to T = 3")),
        ({"lengths": torch.tensor([1, 2]), "return_state": False}, ValueError, ("lengths:", "return_state")),
        ({"in_place": True, "return_state": False}, ValueError, ("in_place:", "return_state")),
        ({"backend": "nobody"}, ValueError, ("backend:", "'nobody'", "'reference'")),
        ({"beta_activation": "tanh"}, ValueError, ("beta_activation:", "'tanh'")),
        ({"state": None}, TypeError, ("state:", "NoneType")),
        ({"read_key": torch.zeros(2, 3, 2, 9)}, ValueError, ("read_key:", "(2, 3, 2, 9)", "(2, 3, 2, 8)")),
        ({"scale": "large"}, TypeError, ("scale:", "str")),
    ],
    ids=str,
)
def test_wrong_arguments(change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        tfla.delta_rule_steps(**one(**change))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_in_place_needs_a_state_that_can_be_overwritten() -> None:
    arguments = one(in_place=True)
    with pytest.raises(ValueError, match=r"^in_place: got True while gradients"):
        tfla.delta_rule_steps(**arguments | {"q": arguments["q"].clone().requires_grad_()})
    wide = tfla.State(arguments["state"].C.double())
    with pytest.raises(TypeError, match=r"^state.C: got dtype torch.float64, expected torch.float32"):
        tfla.delta_rule_steps(**arguments | {"state": wide})
