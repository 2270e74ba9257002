"""Batches of prefills and decoding steps as vLLM describes them, beside each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tfla
from tfla.integrations import vllm
from tfla.ops.state_pool import PoolRows

H, K, V, ROWS = 2, 8, 4, 12
Call = Callable[..., Any]


def mlstm(call: Call, x: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
    return call(x["q"], x["k"], x["v"], x["i"], x["f"], *rest, **options)


def linear_attention(call: Call, x: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
    return call(x["q"], x["k"], x["v"], -x["f"].abs(), *rest, log_i=x["i"], **options)


def gla(call: Call, x: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
    return call(x["q"], x["k"], x["v"], -x["channels"].abs(), *rest, **options)


def delta_rule(call: Call, x: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
    return call(x["q"], x["k"], x["v"], x["i"].sigmoid(), *rest, log_f=-x["f"].abs(), normalize_qk=True, **options)


FORMS: dict[str, tuple[Callable[..., Any], Call, Call]] = {
    "mlstm": (mlstm, tfla.mlstm, vllm.mlstm),
    "linear_attention": (linear_attention, tfla.linear_attention, vllm.linear_attention),
    "gla": (gla, tfla.linear_attention, vllm.linear_attention),
    "delta_rule": (delta_rule, tfla.delta_rule, vllm.delta_rule),
}


def problem(tokens: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    dims = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": (), "channels": (K,)}
    return {name: torch.randn(tokens, H, *d, generator=g, dtype=torch.float64) for name, d in dims.items()}


def pool_of(form: str) -> tfla.State:
    call, operator, _ = FORMS[form]
    x = {name: t.unflatten(0, (ROWS, 5)) for name, t in problem(ROWS * 5, 1).items()}
    state: tfla.State = call(operator, x, return_state=True)[1]
    return state


def metadata(decodes: int, lengths: list[int], rows: list[int], given: list[bool] | None) -> Any:
    return SimpleNamespace(
        num_decodes=decodes, num_prefills=len(lengths), state_indices_tensor=torch.tensor(rows, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *[1] * decodes, *lengths]).cumsum(0).to(torch.int32),
        has_initial_states=None if given is None else torch.tensor(given, dtype=torch.bool),
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(
    data=st.data(), decodes=st.integers(0, 4), lengths=st.lists(st.integers(1, 9), max_size=4), pad=st.integers(0, 3)
)
def test_each_sequence_is_as_alone(form: str, data: st.DataObject, decodes: int, lengths: list[int], pad: int) -> None:
    call, operator, batched = FORMS[form]
    count = decodes + len(lengths)
    rows = data.draw(st.permutations(range(ROWS)))[:count]
    given = data.draw(st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    tokens = decodes + sum(lengths)
    x, pool = problem(tokens + pad, 2), pool_of(form)
    before = pool.clone()
    h = call(batched, x, pool, metadata(decodes, lengths, rows, given))
    start = 0
    for s, length in enumerate([1] * decodes + lengths):
        own = {name: t[None, start : start + length] for name, t in x.items()}
        kept = s < decodes or (given is not None and given[s - decodes])
        state = before.gather([rows[s]]) if kept else None
        expected, after = call(operator, own, initial_state=state, return_state=True)
        assert (h[start : start + length] - expected[0]).norm() <= 1e-10 * expected.norm() + 1e-14
        ours = pool.gather([rows[s]])
        weight = 1.0 if ours.m is None else (ours.m - after.m)[..., None, None].exp()
        assert (ours.C * weight - after.C).norm() <= 1e-10 * after.C.norm()
        start += length
    assert not h[tokens:].any()
    others = [row for row in range(ROWS) if row not in rows]
    assert torch.equal(pool.C[others], before.C[others])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decodes", [0, 2])
def test_prefills_without_any_token(form: str, decodes: int) -> None:
    """Rows that do not go on from their states are zero then, as where other prefills have tokens."""
    call, operator, batched = FORMS[form]
    pool, x = pool_of(form), problem(decodes, 3)
    before = pool.clone()
    h = call(batched, x, pool, metadata(decodes, [0, 0], [*[3, 5][:decodes], 4, 7], [True, False]))
    assert h.shape == x["v"].shape
    for s, row in enumerate([3, 5][:decodes]):
        own = {name: t[None, s : s + 1] for name, t in x.items()}
        expected, _ = call(operator, own, initial_state=before.gather([row]), return_state=True)
        assert (h[s] - expected[0, 0]).norm() <= 1e-10 * expected.norm() + 1e-14
        assert not torch.equal(pool.C[row], before.C[row])
    assert torch.equal(pool.C[4], before.C[4])
    assert not pool.C[7].any()


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_no_row(form: str) -> None:
    call, _, batched = FORMS[form]
    pool = pool_of(form)
    before = pool.clone()
    h = call(batched, problem(6, 3), pool, metadata(2, [3, 1], [-1, 4, -1, 7], None))
    others = [row for row in range(ROWS) if row not in (4, 7)]
    assert torch.equal(pool.C[others], before.C[others])
    assert not torch.equal(pool.C[[4, 7]], before.C[[4, 7]])
    assert not h[0].any()


def test_errors() -> None:
    x, pool = problem(3, 4), pool_of("mlstm")
    with pytest.raises(TypeError, match="pool: got Tensor, expected"):
        mlstm(vllm.mlstm, x, pool.C, metadata(3, [], [0, 1, 2], None))
    with pytest.raises(ValueError, match=r"metadata.state_indices_tensor: got shape \(2,\), expected \(3,\)"):
        mlstm(vllm.mlstm, x, pool, metadata(3, [], [0, 1], None))
    before = pool.clone()
    for rows, message in (
        ([1, 1], "got 1 more than once"),
        ([0, -7], "got -7, expected -1"),
        ([0, ROWS], f"got {ROWS}"),
    ):
        with pytest.raises(ValueError, match=f"metadata.state_indices_tensor: {message}"):
            mlstm(vllm.mlstm, x, pool, metadata(0, [2, 1], rows, [0, 0]))
        with pytest.raises(ValueError, match=f"metadata.state_indices_tensor: {message}"):
            mlstm(vllm.mlstm, x, pool, metadata(1, [2], rows, [0]))
    assert torch.equal(pool.C, before.C)


@pytest.mark.parametrize("name", ["seq_lens", "has_initial_states_p"])
def test_initial_states_have_other_names_in_some_layers(name: str) -> None:
    """seq_lens counts the tokens of a sequence so far, so that a prefill of all of them starts from zero."""
    x, pools, batch = (
        problem(8, 4),
        (pool_of("mlstm"), pool_of("mlstm")),
        metadata(1, [3, 2, 2], [0, 1, 2, 5], [1, 0, 1]),
    )
    expected = mlstm(vllm.mlstm, x, pools[0], batch)
    fields = vars(batch)
    given = fields.pop("has_initial_states")
    fields[name] = torch.tensor([9, 4, 2, 12], dtype=torch.int32) if name == "seq_lens" else given
    assert torch.equal(mlstm(vllm.mlstm, x, pools[1], SimpleNamespace(**fields)), expected)
    assert torch.equal(pools[0].C, pools[1].C)
    fields[name] = fields[name][:2]
    with pytest.raises(ValueError, match=rf"^metadata\.{name}: got shape \(2,\), expected"):
        mlstm(vllm.mlstm, x, pools[1], SimpleNamespace(**fields))
    del fields[name]
    with pytest.raises(TypeError, match=r"^metadata: got SimpleNamespace without has_initial_states, expected one of"):
        mlstm(vllm.mlstm, x, pools[1], SimpleNamespace(**fields))


GIVEN = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("kind", "error", "changes"),
    [
        (ValueError, r"has_initial_states: got shape \(1,\), expected \(2,\)", {"has_initial_states": GIVEN[:1]}),
        (ValueError, r"has_initial_states: got shape \(3,\), expected \(2,\)", {"has_initial_states": GIVEN}),
        (TypeError, "has_initial_states: got dtype torch.float32, expected", {"has_initial_states": torch.ones(2)}),
        (ValueError, "num_decode_tokens: got 2, expected num_decodes, 1: speculative", {"num_decode_tokens": 2}),
        (ValueError, r"query_start_loc: got shape \(3,\), expected \(4,\)", {"query_start_loc": torch.arange(3)}),
        (TypeError, "query_start_loc: got list, expected a tensor", {"query_start_loc": [0, 1, 4, 6]}),
        (TypeError, "has_initial_states: got list, expected a tensor", {"has_initial_states": [True, False]}),
        (TypeError, "state_indices_tensor: got dtype torch.float32", {"state_indices_tensor": torch.arange(3.0)}),
        (ValueError, r"query_start_loc: got \[0, 2, 4, 6\], expected one", {"query_start_loc": torch.arange(0, 7, 2)}),
        (ValueError, r"query_start_loc: .* never fall", {"query_start_loc": torch.tensor([0, 1, 6, 5])}),
        (ValueError, r"query_start_loc: .* up to 6 tokens", {"query_start_loc": torch.tensor([0, 1, 4, 9])}),
        (ValueError, "num_decodes: got -1, expected at least 0", {"num_decodes": -1}),
        (TypeError, "num_prefills: got str, expected an int", {"num_prefills": "2"}),
        (ValueError, "state_indices_tensor: got device meta, expected that of v, cpu", "state_indices_tensor"),
        (ValueError, "query_start_loc: got device meta, expected that of v, cpu", "query_start_loc"),
        (ValueError, "has_initial_states: got device meta, expected that of v, cpu", "has_initial_states"),
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_is_named(kind: type[Exception], error: str, changes: str | dict[str, Any]) -> None:
    x, pool, batch = problem(6, 4), pool_of("mlstm"), metadata(1, [3, 2], [0, 1, 2], [True, False])
    changes = {changes: getattr(batch, changes).to("meta")} if isinstance(changes, str) else changes
    before = pool.clone()
    with pytest.raises(kind, match=f"^metadata.{error}"):
        mlstm(vllm.mlstm, x, pool, SimpleNamespace(**vars(batch) | changes))
    assert torch.equal(pool.C, before.C)


@pytest.mark.parametrize(
    ("kind", "error", "changes"),
    [
        (ValueError, r"q: got shape \(5, .*, expected the 6 tokens of v first", {"q": slice(5)}),
        (TypeError, "v: got NoneType, expected a tensor", {"v": None}),
        (TypeError, "in_place: got it, expected options of both mlstm and mlstm_step", {"in_place": True}),
        (TypeError, "scales: got it, expected options of both", {"scales": 1.0}),
    ],
)
def test_no_row_changes_when_an_argument_does_not_fit(kind: type[Exception], error: str, changes: Any) -> None:
    """Decoding steps overwrite rows before the prompts are read, so all that can be wrong is found before."""
    given: dict[str, Any] = {name: x for name, x in problem(6, 4).items() if name != "channels"}
    changes = {name: given[name][x] if isinstance(x, slice) else x for name, x in changes.items()}
    pool = pool_of("mlstm")
    before = pool.clone()
    with pytest.raises(kind, match=f"^{error}"):
        vllm.mlstm(**given | changes, pool=pool, metadata=metadata(1, [3, 2], [0, 1, 2], [True, False]))
    assert torch.equal(pool.C, before.C)


def test_metadata_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"^metadata: got int without num_decodes, expected vLLM's metadata"):
        mlstm(vllm.mlstm, problem(6, 4), pool_of("mlstm"), 3)


def test_the_number_of_decoding_tokens_may_be_said() -> None:
    x, pools, batch = problem(6, 4), (pool_of("mlstm"), pool_of("mlstm")), metadata(1, [3, 2], [0, 1, 2], None)
    found = mlstm(vllm.mlstm, x, pools[0], SimpleNamespace(**vars(batch), num_decode_tokens=1))
    assert torch.equal(found, mlstm(vllm.mlstm, x, pools[1], batch))


@pytest.mark.parametrize("rows", [[3, 5], [-1, 5], [-1, -1]])
def test_what_a_row_held_before_is_not_read(rows: list[int]) -> None:
    """Prefills from zero overwrite rows whatever these hold, and no other row changes."""
    x, pools = problem(5, 4), (pool_of("mlstm"), pool_of("mlstm"))
    for t in pools[0]:
        assert t is not None
        t[[row for row in rows if row >= 0]] = torch.nan
        t[0] = torch.inf
    h, expected = (mlstm(vllm.mlstm, x, pool, metadata(0, [3, 2], rows, None)) for pool in pools)
    assert torch.equal(h, expected)
    for ours, theirs in zip(*pools, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours[1:], theirs[1:])
        assert ours[0].isposinf().all()


@pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_kernels_of_prefills_take_the_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of a pool is gathered or scattered, and the bits are those of prefills on states of their own."""
    call, operator, batched = FORMS[form]
    device, dtype = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
    x = {name: t.to(device, dtype) for name, t in problem(11, 4).items()}
    pool = tfla.State(*(None if t is None else t.to(device, torch.float32) for t in pool_of(form)))
    batch = metadata(0, [4, 2, 3], [7, 2, -1], [False, True, True])
    fields = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in vars(batch).items()}
    states, expected = pool.gather([7, 2, 0, 0]), pool.clone()
    states.reset([0, 2, 3])
    whole = {name: t[None] for name, t in x.items()}
    offsets = torch.tensor([0, 4, 6, 9, 11], device=device)
    options: dict[str, Any] = {"backend": "triton"}
    with torch.no_grad():
        own, after = call(operator, whole, initial_state=states, cu_seqlens=offsets, return_state=True, **options)
    expected.scatter([7, 2], after.gather([0, 1]))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, lambda *_: pytest.fail("rows are gathered or scattered"))
    h = call(batched, x, pool, SimpleNamespace(**fields), **options)
    assert torch.equal(h[:9], own[0, :9])
    assert not h[9:].any()
    for ours, theirs in zip(pool, expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
