"""Calls with a cached plan, which skip checks and choices, give the results of calls without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import Implementation, Layout, as_it_is, params, problem, solve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tfla
from tfla._util import caching
from tfla._util.caching import CallCache, clear_caches
from tfla.ops.dispatch import call_signature

Run = Callable[..., list[Tensor]]


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


CASES: dict[str, dict[str, Any]] = {
    "exp": {},
    "segments": {"T": 18, "B": 1, "chunk_size": 16},
    "sigmoid": {"form": "sigmoid", "carried": False},
    "packed": {"lengths": (20, 0, 17), "chunk_size": 16},
    "grouped heads": {"form": "normalized", "Hq": 1},
}


@pytest.mark.parametrize("layout", [as_it_is, transposed])
@pytest.mark.parametrize("case", params(CASES, {"segments"}))
def test_other_values_after_a_call_of_these_sizes(
    implementation: Implementation, case: dict[str, Any], layout: Layout
) -> None:
    """Forward and backward."""
    sizes = {name: x for name, x in case.items() if name != "chunk_size"}
    one, two = (problem(dtype=implementation.widest, seed=seed, **sizes) for seed in (1, 2))
    options = {"layout": layout, "chunk_size": case.get("chunk_size")}
    solve(one, implementation, **options)
    found = solve(two, implementation, **options)
    clear_caches()
    expected = solve(two, implementation, **options)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


def steps(device: str, seed: int) -> tuple[list[Tensor], tfla.State]:
    p = problem(dtype=torch.float32, T=1, seed=seed)
    assert p.state is not None
    return [getattr(p, name)[:, 0].to(device) for name in "qkvif"], p.state.to(device).clone()


def flat(result: tuple[Tensor, tfla.State]) -> list[Tensor]:
    h, state = result
    return [h, *(x for x in state if x is not None)]


def wide_n(state: tfla.State) -> tfla.State:
    assert state.n is not None
    return state._replace(n=state.n.repeat_interleave(2, -1)[..., ::2])


VARIANTS: dict[str, Callable[[list[Tensor], tfla.State], tuple[list[Tensor], tfla.State, dict[str, Any]]]] = {
    "in place": lambda x, s: (x, s, {"in_place": True}),
    "one tensor twice": lambda x, s: ([x[0], x[0], *x[2:]], s, {}),
    "strides": lambda x, s: ([t.repeat_interleave(2, -1)[..., ::2] for t in x], s, {}),
    "strides of n": lambda x, s: (x, wide_n(s), {}),
    "float64": lambda x, s: ([t.double() for t in x], s, {}),
    "gates in float16": lambda x, s: ([*x[:3], x[3].half(), x[4].half()], s, {}),
    "scale": lambda x, s: (x, s, {"scale": 2.0}),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_steps_after_others(device: str, variant: Any) -> None:
    """Each of two kinds of steps in turn is what it is by itself."""
    kinds = [lambda x, s: (x, s, {}), variant]

    def run(kind: Any, seed: int) -> list[Tensor]:
        x, state, options = kind(*steps(device, seed))
        with torch.no_grad():
            return [t.clone() for t in flat(tfla.mlstm_step(*x, state, **options))]

    found = [run(kind, seed) for seed in range(3) for kind in kinds]
    expected = []
    for seed in range(3):
        for kind in kinds:
            clear_caches()
            expected.append(run(kind, seed))
    assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_steps_in_place_overwrite_the_state_of_each_call(device: str) -> None:
    with torch.no_grad():
        for seed in range(3):
            x, state = steps(device, seed)
            _, expected = tfla.mlstm_step(*x, state)
            _, new = tfla.mlstm_step(*x, state, in_place=True)
            assert new.C is state.C
            assert torch.equal(state.C, expected.C)


def test_gradients_after_steps_without(device: str) -> None:
    for _ in range(2):
        x, state = steps(device, 0)
        with torch.no_grad():
            tfla.mlstm_step(*x, state)
        h, _ = tfla.mlstm_step(x[0].requires_grad_(), *x[1:], state)
        (gradient,) = torch.autograd.grad(h.sum(), [x[0]])
        assert gradient.abs().sum() > 0
        with pytest.raises(ValueError, match=r"in_place: got True while gradients are recorded"):
            tfla.mlstm_step(*x, state, in_place=True)


def test_a_call_is_checked_whatever_came_before() -> None:
    x = [getattr(problem(carried=False, dtype=torch.float32), name) for name in "qkvif"]
    for _ in range(2):
        tfla.mlstm(*x, chunk_size=1)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"chunk_size: got bool", {"chunk_size": True}),
        (ValueError, r"kernel: got \['parallel'\]", {"kernel": ["parallel"]}),
        (TypeError, r"store_dtype: got list", {"store_dtype": []}),
        (TypeError, r"initial_state: got tuple", {"initial_state": (x[0],)}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            tfla.mlstm(*x, **{"chunk_size": 1, **options})
    with pytest.raises(ValueError, match=r"k: got device meta"):
        tfla.mlstm(x[0], x[1].to("meta"), *x[2:], chunk_size=1)


def test_lengths_on_the_cpu_are_read_each_time() -> None:
    q, k, v, i, f = (getattr(problem(carried=False, dtype=torch.float32, B=1), name) for name in "qkvif")
    tfla.mlstm(q, k, v, i, f, cu_seqlens=torch.tensor([0, 30, 37]))
    with pytest.raises(ValueError, match=r"cu_seqlens: goes from 0 to 36"):
        tfla.mlstm(q, k, v, i, f, cu_seqlens=torch.tensor([0, 30, 36]))


def test_what_distinguishes_calls() -> None:
    x = torch.zeros(2, 4)
    state = tfla.State(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = call_signature((x,), None, None)
    with torch.no_grad():
        without = call_signature((x.clone().requires_grad_(),), None, None)
    found = [
        call_signature((x,), None, None), call_signature((x.clone().requires_grad_(),), None, None), autocast,
        call_signature((x,), None, None, 1), call_signature((x,), state, None), call_signature((x.T,), None, None),
        call_signature((x.half(),), None, None), call_signature((x, None), None, None),
        call_signature((x[:, 1:],), None, None),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert without == found[0] == call_signature((torch.ones(2, 4),), None, None)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Special(Tensor):
    pass


def test_what_others_see_has_none() -> None:
    x = torch.zeros(2, 4)
    recorded = []
    with Mode():
        recorded.append(call_signature((x,), None, None))
    torch.vmap(lambda t: (recorded.append(call_signature((t,), None, None)), t)[1])(x)
    torch.jit.trace(lambda t: (recorded.append(call_signature((t,), None, None)), t + 1)[1], x, check_trace=False)
    recorded += [call_signature((t,), None, None) for t in (x.as_subclass(Special), x.to("meta"), None, 3)]
    recorded += [call_signature((x,), (x,), None), call_signature((x,), None, torch.tensor([0, 2]))]
    assert recorded == [None] * len(recorded)
    assert len(recorded) >= 9


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "MAX_ENTRIES", 3)
    calls: CallCache[int] = CallCache()
    for n in range(5):
        calls.add(n, n)
        assert calls.get(n) == n
        assert len(calls.entries) <= 3
    calls.add(None, 7)
    assert calls.get(None) is None
    clear_caches()
    assert calls.get(4) is None
    caching.ALL_CACHES.remove(calls)


@pytest.mark.interpreter
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_offset_of_the_denominator(device: str, eps: float) -> None:
    """Beside the formula, from the state after the step."""
    from tfla.ops.steps import step_with_offset

    for seed in range(2):
        x, state = steps(device, seed)
        with torch.no_grad():
            h, new = step_with_offset(*x, state, eps)
        q, k, v, i, f = (t.double() for t in x)
        C, n, m = (t.double() for t in state)
        log_f = torch.nn.functional.logsigmoid(f)
        last = torch.maximum(log_f + m, i)
        C = (log_f + m - last).exp()[..., None, None] * C
        C += (i - last).exp()[..., None, None] * k[..., None] * v[..., None, :]
        n = (log_f + m - last).exp()[..., None] * n + (i - last).exp()[..., None] * k
        scale = q.shape[-1] ** -0.5
        d = (n * q).sum(-1) * scale
        bound = torch.maximum(d.abs(), (-last).exp())
        expected = torch.einsum("bhkv,bhk->bhv", C, q) * scale / (bound + eps)[..., None]
        assert (h - expected).norm() <= 1e-5 * expected.norm()
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(new, (C, n, last), strict=True))
