"""The Hopper kernels with gates by channel, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU in the simulator, what Triton launches beside them
in the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from channel_scans import check_scans
from delta_cases import GATES_WITH_MEMORY, check_beside_rounding, delta_problem, with_short_gates
from test_hopper_delta import BACKEND, DEVICE, DTYPE, check, inputs, on_hopper, simulation, solve  # noqa: F401

import tfla
from tfla._util import caching
from tfla.backends import DELTA_BACKENDS, select

pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper

PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "KDA": ("kda", {"T": 130}),
    "one step": ("kda", {"T": 1, "carried": False}),
    "packed": ("kda", {"lengths": (0, 70, 3, 64, 0), "H": 2}),
    "heads that share keys": ("kda", {"T": 70, "H": 3}),
    "more tiles than stages": ("kda", {"T": 330}),
    "72 x 136": ("kda", {"T": 70, "K": 72, "V": 136, "H": 2, "Hq": 2}),
    "tiles that need levels": ("kda", {"T": 70, "gates": "half"}),
    "read keys": ("gdn2", {"T": 70}),
    "GLA": ("gla", {"T": 70, "K": 256, "V": 200}),
    "GLA, packed": ("gla", {"lengths": (64, 0, 66), "V": 64}),
    "GLA, packed with two blocks of channels": ("gla", {"lengths": (0, 70, 1, 64, 0), "K": 200, "V": 136, "H": 2}),
    "GLA, two batch rows": ("gla", {"T": 200, "K": 256, "V": 64, "B": 2}),
}


@pytest.mark.parametrize(("model", "sizes"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_gradients(model: str, sizes: dict[str, Any]) -> None:
    check(delta_problem(model, **{"B": 1, "H": 1, "Hq": 1, "K": 128, "V": 128, **sizes}, dtype=DTYPE), backward=True)


@pytest.mark.parametrize(("model", "sizes"), [("kda", {}), ("kda", {"V": 256}), ("gla", {}), ("gla", {"K": 256})])
def test_scans_alone(model: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan computes what it does in float64."""
    if INTERPRETED:
        from interpreted_bfloat16 import use_bfloat16

        use_bfloat16(monkeypatch)
    p = delta_problem(model, **{"T": 330, "B": 1, "H": 2, "K": 128, "V": 128, **sizes}, dtype=torch.bfloat16)
    check_scans(p, 1e-2)


def test_tiles_with_and_without_levels() -> None:
    p = delta_problem("kda", T=200, B=1, H=1, Hq=1, K=128, V=128, dtype=DTYPE)
    assert p.x.log_f is not None
    log_f = p.x.log_f.clone()
    log_f[:, 70:80] = -20.0
    check(dataclasses.replace(p, x=p.x._replace(log_f=log_f)), backward=True)


@pytest.mark.parametrize("model", ["kda", "gla"])
def test_gates_in_the_dtype_of_q(model: str) -> None:
    p = with_short_gates(delta_problem(model, T=70, B=1, H=1, Hq=1, K=128, V=128, dtype=DTYPE))
    check(p, backward=True)


def test_gates_of_any_size() -> None:
    """A gate at the start of a tile is in no sum of pairs: it may be closed where no levels are needed."""
    p = delta_problem("kda", T=130, B=1, H=1, Hq=1, K=128, V=128, dtype=DTYPE)
    for lowest in (-1e5, -float("inf")):
        assert p.x.log_f is not None
        log_f = p.x.log_f.clone()
        log_f[:, 64, ::3] = lowest
        closed = dataclasses.replace(p, x=p.x._replace(log_f=log_f))
        found = {backend: solve(closed, True, backend) for backend in ("hopper", "triton")}
        for name, t in found["triton"].items():
            assert error(found["hopper"][name], t.double()) <= TOLERANCE[DTYPE], name
        if lowest == -float("inf"):
            assert not found["hopper"]["dlog_f"][:, 64, ::3].any()


def take_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backends run in bfloat16 in the interpreter, too."""
    if INTERPRETED:
        from interpreted_bfloat16 import use_bfloat16

        use_bfloat16(monkeypatch)
        monkeypatch.setattr(DELTA_BACKENDS["triton"], "unsupported", lambda x: None)
        monkeypatch.setattr(BACKEND, "unsupported", lambda x: None)


@pytest.mark.parametrize("model", ["kda", "gla"])
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", ["medium"] if INTERPRETED else GATES_WITH_MEMORY)
def test_errors_beside_those_of_rounding(gates: str, alike: float, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 errors are at most 1.5 times what rounding inputs and outputs costs."""
    if alike and model == "gla":
        pytest.skip("keys correct nothing")
    take_bfloat16(monkeypatch)
    p = delta_problem(model, gates=gates, T=200 if INTERPRETED else 1000, B=1, H=1, Hq=1, K=128, V=128, alike=alike)
    check_beside_rounding(p, gates, functools.partial(solve, backward=True), torch.bfloat16)


def test_gradient_of_beta_that_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers compute it for tiles that have a beta of 0, and the key warp for the others."""
    take_bfloat16(monkeypatch)
    p = delta_problem("kda", T=130, B=1, H=2, Hq=1, K=128, V=64, dtype=torch.bfloat16)
    assert p.x.beta is not None
    beta = p.x.beta.clone()
    beta[:, 64:128:5, 0] = 0.0
    p = dataclasses.replace(p, x=p.x._replace(beta=beta))
    found, expected = (solve(p, True, backend)["dbeta"].double() for backend in ("hopper", "triton"))
    zero = beta == 0
    for where in (zero, ~zero):
        assert error(found[where], expected[where]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("programs", [1, 2])
def test_programs_that_take_several_tiles(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfla.backends.hopper.host.processors", lambda device: programs)
    caching.clear_caches()
    check(delta_problem("kda", T=200, B=1, H=2, Hq=1, K=128, V=128, dtype=DTYPE), backward=True)
    check(delta_problem("gla", T=130, B=1, H=1, Hq=1, K=256, V=128, dtype=DTYPE), backward=True)
    caching.clear_caches()


def test_gradients_with_scale_of_either_sign_and_0() -> None:
    p = delta_problem("kda", K=128, V=128, T=70, B=1, H=1, Hq=1, dtype=DTYPE)
    for scale in (-0.3, 0.0):
        found = [solve(dataclasses.replace(p, scale=scale), True, backend) for backend in ("hopper", "triton")]
        assert scale or not found[0]["dq"].any()
        for name in ("dq", "dk", "dlog_f") if scale else ("dk", "dlog_f"):
            assert error(found[0][name], found[1][name].double()) <= TOLERANCE[DTYPE], name


def test_same_bits_again() -> None:
    """The second call replays the launches of the first."""
    p = delta_problem("kda", T=130, B=1, H=2, Hq=1, K=128, V=128, dtype=DTYPE)
    first, again = solve(p, True), solve(p, True)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def test_is_the_choice_where_it_runs() -> None:
    p = with_short_gates(delta_problem("kda", T=3, B=1, H=1, Hq=1, K=128, V=128, dtype=DTYPE))
    x = inputs(p)
    assert select(None, x, DELTA_BACKENDS) is BACKEND
    assert select(None, x._replace(read_key=x.k), DELTA_BACKENDS) is BACKEND
    given = {name: getattr(x, name) for name in ("q", "k", "v", "beta", "log_f")}
    assert tfla.explain_delta_rule(**given, backend="hopper").backend == "hopper"
    before = tfla.explain_delta_rule(**given, read_before_decay=True)
    assert before.backend == "triton"
    assert "reads after the decay only" in before.not_taken["hopper"]


def test_takes_other_head_dims_to_triton() -> None:
    """`explain` says which head dims the kernels take."""
    for K, V in ((32, 64), (264, 64), (68, 64), (64, 32)):
        p = delta_problem("kda", T=3, B=1, H=1, Hq=1, K=K, V=V, dtype=DTYPE)
        given = {n: getattr(p.x, n).to(DEVICE) for n in ("q", "k", "v", "beta", "log_f")}
        told = tfla.explain_delta_rule(**given)
        assert told.backend == ("chunkwise" if K > 256 else "triton")
        takes = "dqk up to 256" if K > 256 else "multiples of 8, dqk from 64 to 256"
        assert takes in told.not_taken["hopper"]


def test_refuses_other_gates() -> None:
    x = inputs(delta_problem("kda", T=3, B=1, H=2, Hq=2, K=128, V=128, dtype=DTYPE))
    assert x.log_f is not None
    assert "in float32" in (BACKEND.unsupported(x._replace(log_f=x.log_f.double())) or "")
    apart = x.log_f.transpose(2, 3).contiguous().transpose(2, 3)
    assert "next to each other" in (BACKEND.unsupported(x._replace(log_f=apart)) or "")
    equal = x.log_f[:, :, :1].expand(-1, -1, 2, -1)
    assert "16 bytes" in (BACKEND.unsupported(x._replace(log_f=equal)) or "")
