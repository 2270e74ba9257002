"""`states_every`: the states after every n steps, with the bits of a call that stops there, from one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_pools import LOW, in_dtypes, rounding
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tfla
from tfla import State
from tfla.backends import BACKENDS
from tfla.backends.gpu.runtime import INTERPRETED
from tfla.ops.state_pool import PoolRows

__all__ = ["rounding"]

H, K, V = 2, 16, 8
WIDE = (torch.float32,) * 3  # the dtypes of C, n and m


def problem(B: int, T: int, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(B * 1000 + T)

    def random(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, generator=g, dtype=torch.float64).to(dtype)

    return {"q": random(K), "k": random(K), "v": random(V), "i": random(), "f": random() + 2, "channels": random(K)}


def mlstm(x: dict[str, Tensor], **options: Any) -> Any:
    return tfla.mlstm(x["q"], x["k"], x["v"], x["i"], x["f"], **options)


def mlstm_sig(x: dict[str, Tensor], **options: Any) -> Any:
    return mlstm(x, input_gate="sigmoid", **options)


def linear_attention(x: dict[str, Tensor], **options: Any) -> Any:
    return tfla.linear_attention(x["q"], x["k"], x["v"], -x["f"].abs(), **options)


def gla(x: dict[str, Tensor], **options: Any) -> Any:
    return tfla.linear_attention(x["q"], x["k"], x["v"], -x["channels"].abs(), x["i"], **options)


def delta_rule(x: dict[str, Tensor], **options: Any) -> Any:
    more = {"normalize_qk": True, "beta_activation": "sigmoid", "gate_activation": "softplus"}
    A_log, dt_bias = torch.zeros(H), torch.ones(H)
    return tfla.delta_rule(x["q"], x["k"], x["v"], x["i"], x["f"], A_log=A_log, dt_bias=dt_bias, **more, **options)


def delta_product(x: dict[str, Tensor], **options: Any) -> Any:
    """Two writes in each step, the second one with the values and strengths of the first one reversed."""
    k, v, beta = (torch.stack([t, t.flip(-1)], 2).flatten(1, 2) for t in (x["k"], x["v"], x["i"].abs().clamp(max=1)))
    return tfla.delta_product(x["q"], k, v, beta, -x["f"].abs(), writes=2, normalize_qk=True, **options)


def dplr(x: dict[str, Tensor], **options: Any) -> Any:
    a = torch.nn.functional.normalize(x["k"], dim=-1)
    return tfla.dplr(x["q"], x["k"], x["v"], -a, 0.7 * a, -x["channels"].abs(), **options)


CALLS: list[Callable[..., Any]] = [mlstm, mlstm_sig, linear_attention, gla, delta_rule, delta_product, dplr]
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def cut(x: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: t[:, start:stop] for name, t in x.items()}


def check(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    assert found is None or expected is None or torch.equal(found, expected)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (found - expected).norm() <= (1e-11 if dtype == torch.float64 else 1e-5) * expected.norm()


@each_call
@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@settings(max_examples=6, deadline=None)
@given(T=st.integers(1, 150), every=st.integers(1, 160), carried=st.booleans())
def test_states_are_those_of_calls_that_stop_there(
    call: Callable[..., Any], backend: str, T: int, every: int, carried: bool
) -> None:
    x, dtype = problem(2, T, torch.float64), torch.float64
    start = call(problem(2, 9, dtype), return_state=True)[1] if carried else None
    options = {"initial_state": start, "return_state": True, "backend": backend}
    h, last, states = call(x, states_every=every, **options)
    whole, final = call(x, **options)
    close(h, whole, dtype)
    close(last.C, final.C, dtype)
    assert states.C.shape == (2, T // every, H, K, V)
    for j in range(0, T // every, 1 + T // every // 8):
        _, stopped = call(cut(x, 0, (j + 1) * every), states_every=every, **options)[:2]
        for name in ("C", "n", "m"):
            own = getattr(states, name)
            check(None if own is None else own[:, j], getattr(stopped, name))
        _, direct = call(cut(x, 0, (j + 1) * every), **options)
        exact = (
            states.C[:, j] if states.m is None else states.C[:, j] * (states.m[:, j] - direct.m)[..., None, None].exp()
        )
        close(exact, direct.C, dtype)


@each_call
@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), every=st.integers(1, 30))
def test_packed_sequences(call: Callable[..., Any], lengths: list[int], every: int) -> None:
    lengths = [*lengths, 3]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x = problem(1, sum(lengths), torch.float64)
    h, last, states = call(x, cu_seqlens=offsets, return_state=True, states_every=every)
    whole, final = call(x, cu_seqlens=offsets, return_state=True)
    close(h, whole, torch.float64)
    close(last.C, final.C, torch.float64)
    assert states.C.shape == (1, sum(lengths) // every, H, K, V)
    rows = set()
    for s, length in enumerate(lengths):
        a = int(offsets[s])
        own = call(cut(x, a, a + length), return_state=True, states_every=every)[2] if length else None
        for j in range(length // every):
            rows.add(a // every + j)
            assert own is not None
            close(states.C[0, a // every + j], own.C[0, j], torch.float64)
    assert not any(states.C[0, row].any() for row in set(range(sum(lengths) // every)) - rows)


@each_call
def test_rows_of_a_pool(call: Callable[..., Any]) -> None:
    x = problem(2, 23, torch.float32)
    start = call(problem(4, 5, torch.float32), return_state=True)[1]
    pool, rows = start.clone(), torch.tensor([2, -1])
    h, last, states = call(x, initial_state=pool, state_indices=rows, return_state=True, states_every=10)
    zero = start.gather([2, 0])
    zero.reset([1])
    expected_h, expected_last, expected = call(x, initial_state=zero, return_state=True, states_every=10)
    assert last is pool
    check(h[0], expected_h[0])
    check(states.C[0], expected.C[0])
    check(pool.C[2], expected_last.C[0])
    check(pool.C[[0, 1, 3]], start.C[[0, 1, 3]])


@each_call
def test_the_state_is_rounded_to_the_dtype_of_the_pool_once(call: Callable[..., Any]) -> None:
    x = problem(2, 40, torch.float32)
    start = call(problem(4, 5, torch.float32), return_state=True)[1]
    pool = start._replace(C=start.C.bfloat16(), n=None if start.n is None else start.n.bfloat16())
    rows, options = torch.tensor([2, 0]), {"return_state": True}
    wide = State(*(None if t is None else t[rows].float() for t in pool))
    h, last, _ = call(x, initial_state=pool, state_indices=rows, states_every=5, **options)
    expected_h, expected_last, _ = call(x, initial_state=wide, states_every=5, **options)
    check(h, expected_h)
    check(last.C[rows], expected_last.C.bfloat16())


@each_call
def test_a_sequence_without_a_row_goes_on_from_part_to_part(call: Callable[..., Any]) -> None:
    x = problem(2, 23, torch.float32)
    pool = call(problem(4, 5, torch.float32), return_state=True)[1]
    h, _, states = call(x, initial_state=pool, state_indices=torch.tensor([2, -1]), return_state=True, states_every=10)
    expected_h, _, expected = call(x, return_state=True, states_every=10)
    check(h[1], expected_h[1])
    check(states.C[1], expected.C[1])


class Subclass(Tensor):
    """A tensor of which the dispatcher has to see the operators."""


@torch.no_grad()
@each_call
def test_rows_of_a_pool_with_a_subclass_of_tensors(call: Callable[..., Any]) -> None:
    """Only the final states are in the pool, as of plain tensors."""
    x, start = problem(1, 23, torch.float32), call(problem(4, 5, torch.float32), return_state=True)[1]
    options: dict[str, Any] = {"state_indices": torch.tensor([2]), "return_state": True, "states_every": 10}
    pool, expected_pool = start.clone(), start.clone()
    expected_h, _, expected = call(x, initial_state=expected_pool, **options)
    h, _, states = call(x | {"v": x["v"].as_subclass(Subclass)}, initial_state=pool, **options)
    check(h.as_subclass(Tensor), expected_h)
    check(states.C.as_subclass(Tensor), expected.C)
    check(pool.C, expected_pool.C)


@each_call
def test_all_tensors_have_the_same_steps(call: Callable[..., Any]) -> None:
    """A tensor as long as a part would fit every part."""
    x = problem(1, 12, torch.float32)
    two = 2 if call is delta_product else 1  # writes in each step
    with pytest.raises(ValueError, match=rf"v: got shape \(1, {6 * two}, .*expected \(1, {12 * two}\b"):
        call(x | {"v": x["v"][:, :6]}, return_state=True, states_every=6)


def test_gradients_reach_the_states() -> None:
    x = {name: t.requires_grad_() for name, t in problem(1, 12, torch.float64).items()}

    def values(*tensors: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip("qkvif", tensors, strict=True))
        h, last, states = mlstm_sig(own, return_state=True, states_every=5)  # m of mLSTMexp carries no gradient
        return h, last.C, states.C

    assert torch.autograd.gradcheck(values, [x[name] for name in "qkvif"], fast_mode=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"states_every": 0}, ValueError, "states_every: got 0, expected at least 1"),
        ({"states_every": True}, TypeError, "states_every: got bool, expected None or an int"),
        ({"states_every": 4, "return_state": False}, ValueError, "states_every: got 4 with return_state False"),
        ({"states_every": 4, "context_parallel": object()}, ValueError, "states_every: got it with context_parallel"),
        ({"states_every": 4, "backend": "other"}, ValueError, "backend: "),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], words: str) -> None:
    for call in CALLS:
        with pytest.raises(error, match=words):
            call(problem(1, 9, torch.float32), **{"return_state": True} | options)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@each_call
def test_kernels_of_triton(call: Callable[..., Any]) -> None:
    x = problem(1, 140, torch.float32)
    h, last, states = call(x, return_state=True, states_every=64, backend="triton")
    expected_h, expected_last, expected = call(
        {name: t.double() for name, t in x.items()}, return_state=True, states_every=64, backend="reference"
    )
    assert (h - expected_h).norm() <= 1e-3 * expected_h.norm()
    for own, ref in ((last, expected_last), (states, expected)):
        weight = 1.0 if own.m is None else (own.m - ref.m)[..., None, None].exp()
        assert (own.C * weight - ref.C).norm() <= 1e-3 * ref.C.norm()


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@each_call
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("packed", "dtypes"), [(False, WIDE), (True, WIDE), (False, LOW[0]), (True, LOW[1])], ids=str)
def test_kernels_of_triton_read_and_overwrite_the_rows(
    call: Callable[..., Any], packed: bool, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of separate states, without a copy: a row, no row, one that the pool lacks, and short sequences."""
    lengths, rows = ([70, 0, 5, 40, 37], [2, 0, 4, -1, 9]) if packed else ([70], [2])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = problem(1, sum(lengths), torch.float32)
    pages = call(problem(12, 5, torch.float32), return_state=True)[1]
    pages = in_dtypes(State(*(None if t is None else t.unflatten(0, (6, 2)) for t in pages)), dtypes)
    pool = State(*(None if t is None else t.clone()[:, 1] for t in pages))  # rows that do not follow each other
    options: dict[str, Any] = {"cu_seqlens": offsets if packed else None, "backend": "triton"}
    options |= {"return_state": True, "states_every": 32}
    separate = in_dtypes(pool.gather([row if 0 <= row < 6 else 0 for row in rows]), WIDE)
    separate.reset([s for s, row in enumerate(rows) if row == -1])
    expected_h, last, expected = call(x, initial_state=separate, **options)
    after = pool.clone()
    written = [s for s, row in enumerate(rows) if 0 <= row < 6]
    after.scatter([rows[s] for s in written], last.gather(written))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, refused)
    monkeypatch.setattr("tfla.ops.checks.check_values_of_indices", lambda *_: None)
    h, found, states = call(x, initial_state=pool, state_indices=torch.tensor(rows), **options)
    assert found is pool
    known = offsets[4] if packed else 70  # the steps before those of the sequence whose row is not there
    check(h[:, :known], expected_h[:, :known])
    assert h[:, known:].isnan().all()
    for own, ref, kept in zip(states, expected, pool, strict=True):
        if own is not None and ref is not None and kept is not None:
            check(own[:, : known // 32], ref[:, : known // 32])
    assert states.C[:, known // 32 :].isnan().all()
    for own, ref in zip(pool, after, strict=True):
        check(own, ref)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("packed", [False, True])
def test_a_last_state_that_is_returned_is_also_in_the_pool(packed: bool) -> None:
    x = problem(1, 64, torch.float32)
    pool = mlstm(problem(3, 5, torch.float32), return_state=True)[1]
    options: dict[str, Any] = {"backend": "triton", "states_every": 32}
    options["cu_seqlens"] = torch.tensor([0, 64]) if packed else None
    expected_h, last, expected = mlstm(x, initial_state=pool.gather([1]), return_state=True, **options)
    h, _, states = mlstm(x, initial_state=pool, state_indices=torch.tensor([1]), return_state=True, **options)
    check(h, expected_h)
    for own, ref, final, kept in zip(states, expected, last, pool, strict=True):
        check(own, ref)
        assert kept is not None
        check(kept[1:2], final)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_parts_in_segments_go_from_row_to_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernels of "segmented" read other rows than its last one writes."""
    x = problem(1, 300, torch.float32)
    pool = delta_rule(problem(3, 5, torch.float32), return_state=True)[1]
    options: dict[str, Any] = {"backend": "triton", "kernel": "segmented", "chunk_size": 64, "states_every": 140}
    expected_h, last, expected = delta_rule(x, initial_state=pool.gather([2]), return_state=True, **options)
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, refused)
    h, _, states = delta_rule(x, initial_state=pool, state_indices=torch.tensor([2]), return_state=True, **options)
    check(h, expected_h)
    check(states.C, expected.C)
    check(pool.C[2:], last.C)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_parts_that_no_kernel_reads_by_rows_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part, which has other steps, may have another kernel."""
    x = problem(1, 70, torch.float32)
    pool = mlstm(problem(3, 5, torch.float32), return_state=True)[1]
    options: dict[str, Any] = {"backend": "triton", "states_every": 32, "return_state": True}
    expected_h, last, expected = mlstm(x, initial_state=pool.gather([1]), **options)
    backend = type(BACKENDS["triton"])
    by_rows = backend.forward_by_rows
    monkeypatch.setattr(
        backend, "forward_by_rows", lambda b, x, *more: by_rows(b, x, *more) if x.q.shape[1] > 6 else None
    )
    h, _, states = mlstm(x, initial_state=pool, state_indices=torch.tensor([1]), **options)
    check(h, expected_h)
    check(states.C, expected.C)
    check(pool.C[1:2], last.C)
    check(pool.m[1:2], last.m)


def refused(*_: object) -> None:
    raise AssertionError("rows are gathered or scattered")


@each_call
def test_shapes_alone_and_export(call: Callable[..., Any]) -> None:
    x = problem(2, 10, torch.float32)
    expected = call(x, return_state=True, states_every=4)
    with FakeTensorMode() as mode:
        found = call({name: mode.from_tensor(t) for name, t in x.items()}, return_state=True, states_every=4)
    assert found[0].shape == expected[0].shape
    assert found[2].C.shape == expected[2].C.shape

    class Layer(torch.nn.Module):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return call(x, return_state=True, states_every=4)[2].C

    exported = torch.export.export(Layer(), (x,), strict=False).module()
    assert torch.equal(exported(x), expected[2].C)
