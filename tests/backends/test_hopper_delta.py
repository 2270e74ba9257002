"""The Hopper kernels of the delta rule, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import (
    GATES_WITH_MEMORY,
    DeltaProblem,
    check_beside_rounding,
    check_beside_terms,
    delta_problem,
    rounding_of_inputs,
    truth,
)
from hopper_simulation import simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tfla
from tfla._util import caching
from tfla.backends import DELTA_BACKENDS, select
from tfla.backends.delta import DeltaInputs

__all__ = ["simulation"]  # a fixture of all tests of this module

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.delta_h", exc_type=ImportError)

BACKEND = DELTA_BACKENDS["hopper"]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
MANY_HEADS = 3 if INTERPRETED else 50


def inputs(p: DeltaProblem) -> DeltaInputs:
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert BACKEND.unsupported(x) is None
    return x


def solve(p: DeltaProblem, backward: bool, backend: str = "hopper") -> dict[str, Tensor]:
    """The quantities of `truth` by the kernels, without `backward` h and C alone."""
    kernels = DELTA_BACKENDS[backend]
    x, spec = inputs(p), p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))
    out = kernels.forward(x, spec)
    found = {"h": out.h, "C": out.C}
    if backward:
        grads = kernels.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
        found |= {f"d{name}": getattr(grads, name) for name in p.leaves}
    return {name: t.cpu() for name, t in found.items()}


def solve_segments(p: DeltaProblem, backend: str = "hopper", chunk_size: int = 64) -> dict[str, Tensor]:
    """The quantities of `truth` by segments, from calls that replay recorded launches."""
    kernels, x, spec = DELTA_BACKENDS[backend], inputs(p), p.spec("segmented", chunk_size)
    for _ in range(2):
        out = kernels.forward(x, spec)
        grads = kernels.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
    found = {"h": out.h, "C": out.C} | {f"d{name}": getattr(grads, name) for name in p.leaves}
    return {name: t.cpu() for name, t in found.items()}


def gradients_by_triton(p: DeltaProblem) -> dict[str, Tensor]:
    """The gradients that Triton's kernels compute of what the Hopper kernel stores."""
    x, spec = inputs(p), p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))
    out = BACKEND.forward(x, spec)
    grads = DELTA_BACKENDS["triton"].backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
    return {f"d{name}": getattr(grads, name).cpu() for name in p.leaves}


def check(p: DeltaProblem, backward: bool = not INTERPRETED) -> None:
    """Check the forward, and on a GPU also the gradients."""
    found = solve(p, backward)
    if not backward:
        found |= {name: x for name, x in truth(p).items() if name not in found}
    check_beside_terms(p, found)


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1, "carried": False},
    "a tile": {"T": 64, "B": 1},
    "more tiles than stages": {"T": 290, "B": 1, "H": 1, "Hq": 1},
    "more heads than multiprocessors": {"B": 3, "H": MANY_HEADS, "Hq": MANY_HEADS, "T": 70},
    "heads that share keys": {"T": 70, "Hq": 1, "H": 3, "B": 1},
    "128 x 256": {"T": 130, "V": 256, "B": 1, "Hq": 1},
    "64 x 64": {"T": 70, "K": 64, "V": 64, "B": 1},
    "72 x 136": {"T": 70, "K": 72, "V": 136, "B": 1},
    "packed": {"lengths": (0, 100, 1, 64, 0), "Hq": 1},
}


@pytest.mark.parametrize("model", ["deltanet", "gdn"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str) -> None:
    check(delta_problem(model, **{"K": 128, "V": 128, **shape}, dtype=DTYPE))


GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("gdn", {"T": 70}),
    "packed": ("gdn", {"lengths": (0, 70, 3, 64), "Hq": 1}),
    "checkpoints": ("gdn", {"T": 330, "H": 1, "Hq": 1}),
    "128 x 256": ("gdn", {"T": 130, "V": 256, "H": 1, "Hq": 1}),
    "72 x 136": ("gdn", {"T": 70, "K": 72, "V": 136}),
    "without gates": ("deltanet", {"T": 130, "K": 64, "H": 1, "Hq": 1}),
    "without initial states": ("gdn", {"T": 130, "carried": False, "Hq": 1}),
    "gates that close": ("gdn", {"T": 130, "gates": "half", "H": 1, "Hq": 1}),
    "gates that reset": ("gdn", {"T": 130, "gates": "resets", "alike": 0.9, "H": 1, "Hq": 1}),
}


@pytest.mark.parametrize(("model", "sizes"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients(model: str, sizes: dict[str, Any]) -> None:
    check(delta_problem(model, **{"K": 128, "V": 128, "B": 1, **sizes}, dtype=DTYPE), backward=True)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("gdn", {"T": 150}), ("gdn", {"T": 130, "V": 136, "K": 72, "carried": False}), ("deltanet", {"T": 130, "B": 2})],
    ids=str,
)
def test_segments(model: str, sizes: dict[str, Any]) -> None:
    """Segments of whole tiles side by side, and what the cotangents of initial states take of the backward alone."""
    p = delta_problem(model, **{"K": 64, "V": 64, "B": 1, "H": 2, "Hq": 1, **sizes}, dtype=DTYPE)
    check_beside_terms(p, solve_segments(p))
    x, spec = inputs(p), p.spec("segmented", 64)
    out = BACKEND.forward(x, spec)
    alone = BACKEND.initial_cotangent(x, out, p.dh.to(DEVICE), spec)
    exact = DELTA_BACKENDS["triton"].initial_cotangent(x, out, p.dh.to(DEVICE), spec)
    assert error(alone, exact.double()) <= TOLERANCE[DTYPE]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("gdn", {"lengths": (70, 0, 130), "V": 136}), ("deltanet", {"T": 70, "B": 2, "K": 72})],
    ids=str,
)
def test_action_of_sequences(model: str, sizes: dict[str, Any]) -> None:
    """The final state is A C + S, for any state C before the sequence."""
    p = delta_problem(model, **{"K": 64, "V": 64, "B": 1, "H": 2, "Hq": 1, **sizes}, dtype=DTYPE)
    x, spec = inputs(p), p.spec("fused")
    for _ in range(2):
        found = BACKEND.action(x, spec)
    assert found is not None
    assert x.C is not None
    A, S = found
    assert error((A @ x.C + S).cpu(), truth(p)["C"]) <= TOLERANCE[DTYPE]


def test_gradients_of_several_checkpoints_are_those_of_triton() -> None:
    p = delta_problem("gdn", K=128, V=128, B=1, H=1, Hq=1, T=330 if INTERPRETED else 5000, dtype=DTYPE)
    found, by_triton = solve(p, True), gradients_by_triton(p)
    for name, t in by_triton.items():
        assert error(found[name], t.double()) <= TOLERANCE[DTYPE], name


def test_gradients_with_scale_of_either_sign_and_0() -> None:
    p = delta_problem("gdn", K=128, V=128, T=70, B=1, H=1, Hq=1, dtype=DTYPE)
    for scale in (-0.3, 0.0):
        q = dataclasses.replace(p, scale=scale)
        found, exact = solve(q, True), truth(q)
        assert scale or not found["dq"].any()
        for name in ("dq", "dk") if scale else ("dk",):
            assert error(found[name], exact[name]) <= TOLERANCE[DTYPE], name


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", ["long", "medium", "short", "closed", "half", "resets"])
def test_gates(gates: str, alike: float) -> None:
    """Errors of h and C are at most 1.5 times what rounding costs, or the Triton kernels'; E and X are near theirs."""
    from tfla.backends.hopper.delta_backend import forward_kernels
    from tfla.backends.triton import delta

    T = 200 if INTERPRETED else 1000
    p = delta_problem("gdn", gates=gates, T=T, B=1, H=1, Hq=1, K=128, V=128, alike=alike)
    exact, costs = truth(p), rounding_of_inputs(p, DTYPE)
    p = p.to(DTYPE)
    x, spec = inputs(p), p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))
    out = delta.run_forward(x, spec, forward_kernels())
    by_triton = DELTA_BACKENDS["triton"].forward(x, spec)
    for name in ("h", "C"):
        found, other = (error(getattr(o, name).cpu(), exact[name]) for o in (out, by_triton))
        assert found <= max(1.5 * costs[name], 1.1 * other), name
    for name in ("E", "X"):
        found, other = (getattr(o, name).cpu() for o in (out, by_triton))
        assert error(found, other.double()) <= TOLERANCE[DTYPE], name


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize(
    ("model", "gates"), [("deltanet", "medium"), *(("gdn", how) for how in GATES_WITH_MEMORY)]
)  # DeltaNet has no gates
def test_errors_beside_those_of_rounding(model: str, gates: str, alike: float) -> None:
    """The bound of the Triton kernels holds for the Hopper kernels, in the simulator where Triton's meet it, too.

    float16, which the simulator takes, rounds X as it rounds inputs.
    """
    sizes = {"T": 130, "H": 1, "Hq": 1} if INTERPRETED else {"T": 1000}
    p = delta_problem(model, gates=gates, B=1, K=128, V=128, alike=alike, **sizes)
    hopper, triton = (functools.partial(solve, backward=True, backend=name) for name in ("hopper", "triton"))
    if INTERPRETED:
        check_beside_rounding(p, gates, hopper, DTYPE, triton)
    else:
        check_beside_rounding(p, gates, hopper, DTYPE)


@pytest.mark.parametrize("gates", ["long", "resets"] if INTERPRETED else GATES_WITH_MEMORY)
def test_errors_of_segments_beside_those_of_rounding(gates: str) -> None:
    """The bound holds where a state has passed several segments."""
    sizes = {"T": 260, "H": 1, "Hq": 1} if INTERPRETED else {"T": 2000}
    p = delta_problem("gdn", gates=gates, B=1, K=128, V=128, alike=0.9, **sizes)
    hopper, triton = (
        functools.partial(solve_segments, backend=name, chunk_size=64 if INTERPRETED else 256)
        for name in ("hopper", "triton")
    )
    check_beside_rounding(p, gates, hopper, DTYPE, triton if INTERPRETED else None)


def test_errors_without_gates_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for any number of steps in bfloat16, also in the simulator."""
    if INTERPRETED:
        from interpreted_bfloat16 import use_bfloat16

        use_bfloat16(monkeypatch)
    p = delta_problem("deltanet", T=1000 if INTERPRETED else 4000, B=1, H=1, Hq=1, K=64, V=64)
    check_beside_rounding(p, "medium", functools.partial(solve, backward=True), torch.bfloat16)


@pytest.mark.parametrize(("V", "H"), [(128, 2), (256, 1)])
def test_gradients_of_gates_between_resets(V: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dlog_f of alike keys is within the bound in bfloat16, also in the simulator.

    Memories of more than a tile that gates end are read by one side of each tile alone, of which rounding adds up.
    """
    if INTERPRETED:
        from interpreted_bfloat16 import use_bfloat16

        use_bfloat16(monkeypatch)
    p = delta_problem("gdn", gates="resets", T=1000, B=1, H=H, Hq=H, K=128, V=V, alike=0.9)
    found = solve(p.to(torch.bfloat16), backward=True)["dlog_f"]
    assert error(found, truth(p)["dlog_f"]) <= 1.5 * rounding_of_inputs(p, torch.bfloat16)["dlog_f"]


@pytest.mark.parametrize("gates", ["long", "resets"])
def test_errors_of_wide_heads_are_those_of_triton(gates: str) -> None:
    """Errors are at most 1.1 times those of the Triton kernels, or within the bound, also of dlog_f of alike keys."""
    sizes = {"T": 130 if INTERPRETED else 1000, "H": 1, "Hq": 1}
    p = delta_problem("gdn", gates=gates, B=1, K=128, V=256, alike=0.9, **sizes)
    hopper, triton = (functools.partial(solve, backward=True, backend=name) for name in ("hopper", "triton"))
    check_beside_rounding(p, gates, hopper, DTYPE, triton)


@pytest.mark.parametrize("programs", [1, 2])
def test_programs_that_take_several_heads(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program goes on with its next head where the ring is, and starts it from the state of that head."""
    monkeypatch.setattr("tfla.backends.hopper.host.processors", lambda device: programs)
    caching.clear_caches()
    for sizes in ({"T": 70}, {"lengths": (70, 0, 65)}):
        check(delta_problem("gdn", K=128, V=128, dtype=DTYPE, **sizes), backward=True)
    caching.clear_caches()


def test_scale_of_either_sign_and_0() -> None:
    p = delta_problem("gdn", K=128, V=128, T=70, B=1, dtype=DTYPE)
    for scale in (-0.3, 0.0):
        q = dataclasses.replace(p, scale=scale)
        found = BACKEND.forward(inputs(q), q.spec("fused")).h.cpu()
        assert not found.any() if scale == 0 else error(found, truth(q)["h"]) <= TOLERANCE[DTYPE]


def test_beta_of_either_sign() -> None:
    """beta may have either sign and any size, because nothing is divided by it."""
    p = delta_problem("gdn", K=128, V=128, T=70, B=1, dtype=DTYPE)
    assert p.x.beta is not None
    beta = p.x.beta.clone()
    beta[:, ::3] = 0.0
    beta[:, 1::3] *= -0.5
    check(dataclasses.replace(p, x=p.x._replace(beta=beta)), backward=True)


def test_gates_above_0_leave_no_nan() -> None:
    p = delta_problem("gdn", T=150, B=1, K=128, V=128, carried=False, dtype=DTYPE)
    assert p.x.log_f is not None
    keys, values = torch.zeros_like(p.x.q), torch.zeros_like(p.x.v)
    p = dataclasses.replace(p, x=p.x._replace(q=keys, k=keys, v=values, log_f=torch.full_like(p.x.log_f, 0.8)))
    out = BACKEND.forward(inputs(p), p.spec("fused"))
    assert not out.h.any()  # NaN is true
    assert not out.C.any()


def test_same_bits_again() -> None:
    """The second call replays the launches of the first."""
    p = delta_problem("gdn", T=130, B=1, K=128, V=128, dtype=DTYPE)
    first, again = solve(p, True), solve(p, True)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("sizes", [{"T": 70}, {"lengths": (3, 66)}], ids=["dense", "packed"])
def test_cotangents_of_initial_states_alone(sizes: dict[str, Any]) -> None:
    """The scan of Triton takes what the kernels here store, which is what `saved` says."""
    p = delta_problem("gdn", **{"B": 1, "H": 2, "Hq": 1, "K": 64, "V": 64, **sizes}, dtype=DTYPE)
    p = dataclasses.replace(p, dC=torch.zeros_like(p.dC))
    x, spec = inputs(p), p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))
    out = BACKEND.forward(x, spec)
    saved = BACKEND.saved(x, True, spec.chunk_size, "fused")
    assert [(tuple(t.shape), t.dtype) for t in (out.E, out.X, out.chunk_C)] == [*saved]
    for _ in range(2):  # the second call replays the first one's launches
        found = BACKEND.initial_cotangent(x, out, p.dh.to(DEVICE), spec)
        assert error(found.cpu(), truth(p)["dC"]) < TOLERANCE[DTYPE]


def test_addresses_that_descriptors_do_not_take() -> None:
    """Tensors that begin 8 bytes after a multiple of 16 are copied."""
    p = delta_problem("gdn", T=70, B=1, K=64, V=64, dtype=DTYPE)
    x, spec = inputs(p), p.spec("fused")

    def moved(t: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.pad(t, (4, 4))[..., 4:-4]
        assert found.data_ptr() % 16 == 8
        return found

    y = x._replace(q=moved(x.q), k=moved(x.k), v=moved(x.v))
    assert BACKEND.unsupported(y) is None
    assert BACKEND.forward_replay(y, spec) is None
    dh, dC = p.dh.to(DEVICE), p.dC.to(DEVICE).float()
    outs = [BACKEND.forward(each, spec) for each in (x, y)]
    assert torch.equal(outs[0].h, outs[1].h)
    grads = [
        BACKEND.backward(each, out, g, dC, spec) for each, out, g in zip((x, y), outs, (dh, moved(dh)), strict=True)
    ]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_an_empty_batch_is_of_other_backends() -> None:
    x = inputs(delta_problem("gdn", T=70, B=1, K=64, V=64, carried=False, dtype=DTYPE))
    empty = x._replace(**{name: t[:0] for name, t in x._asdict().items() if t is not None})
    assert BACKEND.unsupported(empty) == "it takes no empty batch"


def test_sequences_do_not_leak() -> None:
    """No bit of the other sequences' results changes when all inputs of the second one are multiplied by 8."""
    p = delta_problem("gdn", lengths=(70, 65, 1, 64), K=128, V=128, dtype=DTYPE)
    more = {name: getattr(p.x, name).clone() for name in ("q", "k", "v")}
    for t in more.values():
        t[:, 70:135] *= 8
    a, b = (BACKEND.forward(inputs(o), p.spec("fused")) for o in (p, dataclasses.replace(p, x=p.x._replace(**more))))
    rest = [*range(70), *range(135, 200)]
    assert torch.equal(a.h[:, rest], b.h[:, rest])
    assert torch.equal(a.C[[0, 2, 3]], b.C[[0, 2, 3]])


@settings(max_examples=3 if INTERPRETED else 30, deadline=None)
@given(
    st.sampled_from(["deltanet", "gdn"]), st.integers(1, 200), st.integers(8, 16), st.integers(8, 32),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_any_problem(model: str, T: int, K: int, V: int, heads: tuple[int, int], carried: bool, seed: int) -> None:
    check(
        delta_problem(
            model, B=1, T=T, K=8 * K, V=8 * V, Hq=heads[0], H=heads[1], carried=carried, seed=seed, dtype=DTYPE
        )
    )


def test_public_function() -> None:
    """tfla.delta_rule takes the kernel on request, also without gradients, where it stores no E."""
    p = delta_problem("gdn", T=70, B=1, K=128, V=128, carried=False, dtype=DTYPE)
    given = [getattr(p.x, name).to(DEVICE) for name in ("q", "k", "v", "beta", "log_f")]
    h = tfla.delta_rule(*given, scale=p.scale, backend="hopper")
    leaves = [t.requires_grad_() for t in given]
    with_gradients, state = tfla.delta_rule(*leaves, scale=p.scale, backend="hopper", return_state=True)
    assert torch.equal(h, with_gradients)
    assert error(h.detach().cpu(), truth(p)["h"]) <= TOLERANCE[DTYPE]
    assert error(state.C.detach().cpu(), truth(p)["C"]) <= TOLERANCE[DTYPE]
    dv = torch.autograd.grad(with_gradients, leaves, p.dh.to(h))[2]
    assert dv.isfinite().all()


def test_is_the_choice_where_it_runs() -> None:
    p = delta_problem("gdn", T=70, B=1, K=128, V=128, dtype=DTYPE)
    x = inputs(p)
    assert select(None, x, DELTA_BACKENDS) is BACKEND
    small = x._replace(q=x.q[..., :32], k=x.k[..., :32])
    assert select(None, small, DELTA_BACKENDS).name == "triton"
    given = {name: getattr(x, name) for name in ("q", "k", "v", "beta", "log_f")}
    assert tfla.explain_delta_rule(**given, backend="hopper").backend == "hopper"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dqk with gates by channel": ("kda", {"K": 56}, "dqk from 64 to 256"),
    "read key": ("read", {}, "a read key with gates by channel alone"),
    "dqk": ("gdn", {"K": 136}, "dqk from 64 to 128"),
    "small dqk": ("gdn", {"K": 56}, "dqk from 64 to 128"),
    "dhv": ("gdn", {"V": 264}, "dhv"),
    "multiple of 8": ("gdn", {"V": 100}, "multiples of 8"),
    "dtype": ("gdn", {"dtype": torch.float32}, "it takes bfloat16"),
}


@pytest.mark.parametrize(("model", "sizes", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(model: str, sizes: dict[str, Any], why: str) -> None:
    p = delta_problem(model, **{"T": 3, "B": 1, "K": 128, "V": 128, "dtype": DTYPE, **sizes})
    said = BACKEND.unsupported(DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x)))
    assert said is not None
    assert why in said


def test_refuses_unaligned_strides_and_reads_before_the_decay() -> None:
    p = delta_problem("gdn", T=3, B=1, K=128, V=128, dtype=DTYPE)
    x = inputs(p)
    unaligned = torch.zeros(1, 3, 2, 132, dtype=DTYPE, device=DEVICE)[..., :128]
    assert "16 bytes" in (BACKEND.unsupported(x._replace(q=unaligned)) or "")
    given = [getattr(x, name) for name in ("q", "k", "v", "beta", "log_f")]
    with pytest.raises(ValueError, match="reads after the decay only"):
        tfla.delta_rule(*given, read_before_decay=True, backend="hopper")
