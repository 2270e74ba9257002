"""The options of `selective_state_update` for servers, against a loop over sequences and tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from hypothesis import given
from hypothesis import strategies as st
from mamba_truth import draw, step_by_formula
from torch import Tensor

from tfla.integrations.mamba import selective_state_update

SLOTS, HEADS, HEADDIM, GROUPS, DSTATE = 12, 4, 6, 2, 8
ONE = torch.tensor([1])


def drawn(*lead: int, per_head: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return a pool of states, weights, and tokens with these leading dimensions."""
    rest = (1, 1) if per_head else (HEADDIM, DSTATE)
    return {
        "state": draw(SLOTS, HEADS, HEADDIM, DSTATE).to(dtype),
        "x": draw(*lead, HEADS, HEADDIM).to(dtype),
        "dt": (draw(*lead, HEADS, rest[0]) / 2).to(dtype).expand(*lead, HEADS, HEADDIM),
        "A": (-torch.rand(HEADS, *rest, dtype=torch.float64).to(dtype)).expand(HEADS, HEADDIM, DSTATE),
        "B": draw(*lead, GROUPS, DSTATE).to(dtype),
        "C": draw(*lead, GROUPS, DSTATE).to(dtype),
        "D": draw(HEADS, 1).to(dtype).expand(HEADS, HEADDIM),
        "z": draw(*lead, HEADS, HEADDIM).to(dtype),
        "dt_bias": draw(HEADS, rest[0]).to(dtype).expand(HEADS, HEADDIM),
    }


def token(p: dict[str, Tensor], at: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and the state after one token of one sequence."""
    of_token = {name: p[name][at][None].double() for name in ("x", "dt", "B", "C", "z")}
    weights = {name: p[name].double() for name in ("A", "D", "dt_bias")}
    y, new = step_by_formula({**of_token, **weights, "state": state[None]}, softplus=True)
    return y[0], new[0]


def check(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    assert error(found.double(), expected.double()) <= max(TOLERANCE[dtype], 1e-12)


@pytest.mark.parametrize("per_head", [True, False], ids=["Mamba-2", "Mamba"])
def test_states_go_to_other_rows(per_head: bool) -> None:
    """The row that one sequence writes may be that which another one reads."""
    p = drawn(4, per_head=per_head)
    pool = p["state"].clone()
    read, written = [3, 5, -1, 7], [5, 3, 1, 0]
    out = torch.full_like(p["x"], torch.nan)
    given = {name: t for name, t in p.items() if name != "state"}
    found = selective_state_update(
        pool, **given, dt_softplus=True, state_batch_indices=torch.tensor(read, dtype=torch.int32),
        dst_state_batch_indices=torch.tensor(written, dtype=torch.int32), out=out,
    )  # fmt: skip
    assert found is out
    expected = p["state"].clone()
    for n in (0, 1, 3):
        y, expected[written[n]] = token(p, n, p["state"][read[n]])
        check(out[n], y)
    assert not out[2].any()
    check(pool, expected)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 3), st.booleans(), st.integers(0, 99)
)  # fmt: skip
def test_speculation_over_packed_sequences(lengths: list[int], accepted: int, is_padded: bool, seed: int) -> None:
    """As vLLM's backend calls it: a column of rows for each proposed token, and the state of the last accepted one."""
    torch.manual_seed(seed)
    p = drawn(sum(lengths))
    count, columns = len(lengths), 3
    rows = torch.randperm(SLOTS - 1)[: count * columns].view(count, columns) + 1
    if is_padded:
        rows[0] = 0
    numbers = torch.tensor([(accepted + n) % (columns + 1) for n in range(count)])
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    pool, out = p["state"].clone(), torch.full_like(p["x"], 7.0)
    given = {name: t for name, t in p.items() if name != "state"}
    selective_state_update(
        pool, **given, dt_softplus=True, state_batch_indices=rows, null_block_id=0, out=out, cu_seqlens=offsets,
        num_accepted_tokens=numbers,
    )  # fmt: skip
    expected, of_tokens = p["state"].clone(), torch.zeros_like(out)
    for n, length in enumerate(lengths):
        state = p["state"][rows[n, max(int(numbers[n]) - 1, 0)]]
        for j in range(length if rows[n, 0] else 0):
            of_tokens[offsets[n] + j], state = token(p, offsets[n] + j, state)
            expected[rows[n, j]] = state
    check(out, of_tokens)
    check(pool, expected)


def test_packed_sequences_with_one_column_of_rows() -> None:
    """The columns bound the tokens of a sequence only where each token has one."""
    p = drawn(4)
    given = {name: t for name, t in p.items() if name != "state"} | {"cu_seqlens": torch.tensor([0, 3, 4])}
    pools = [p["state"].clone() for _ in range(2)]
    outs = [
        selective_state_update(pool, **given, dt_softplus=True, state_batch_indices=rows)
        for pool, rows in zip(pools, (torch.tensor([2, 5]), torch.tensor([[2], [5]])), strict=True)
    ]
    assert torch.equal(*outs)
    assert torch.equal(*pools)
    assert outs[0].any(-1).all()


def test_states_of_16_bits_are_not_rounded_between_tokens() -> None:
    p = drawn(1, 3, dtype=torch.float32) | {"state": draw(2, HEADS, HEADDIM, DSTATE).bfloat16()}
    out = selective_state_update(**p | {"state": p["state"].clone()}, dt_softplus=True, state_batch_indices=ONE)
    wide = selective_state_update(**p | {"state": p["state"].float()}, dt_softplus=True, state_batch_indices=ONE)
    assert torch.equal(out, wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_of_a_batch(dtype: torch.dtype) -> None:
    """As flashinfer verifies proposals: the pool stays, and a buffer gets the state after each token."""
    p = drawn(2, 3, dtype=dtype)
    pool, buffer = p["state"].clone(), torch.full((5, 3, HEADS, HEADDIM, DSTATE), 7.0, dtype=dtype)
    given = {name: t for name, t in p.items() if name != "state"}
    rows, places = torch.tensor([4, 9]), torch.tensor([3, 0])
    options = {"dt_softplus": True, "state_batch_indices": rows, "intermediate_states_buffer": buffer}
    out = selective_state_update(pool, **given, **options, disable_state_update=True, intermediate_state_indices=places)
    assert torch.equal(pool, p["state"])
    assert (buffer[[1, 2, 4]] == 7.0).all()
    again = selective_state_update(pool, **given, dt_softplus=True, state_batch_indices=rows)
    assert torch.equal(again, out)
    for n in range(2):
        state = p["state"][rows[n]].double()
        for j in range(3):
            y, state = token(p, (n, j), state)
            check(out[n, j], y, dtype)
            check(buffer[places[n], j], state, dtype)
        check(pool[rows[n]], state, dtype)


def test_shapes_without_heads() -> None:
    """A pool of Mamba's states, (rows, dim, dstate), and packed sequences of 2 and 1 tokens."""
    state, A = draw(4, HEADDIM, DSTATE), -torch.rand(HEADDIM, DSTATE, dtype=torch.float64)
    x, dt, B, C = draw(3, HEADDIM), draw(3, HEADDIM), draw(3, DSTATE), draw(3, DSTATE)
    pool = state.clone()
    out = selective_state_update(
        pool, x, dt, A, B, C, dt_softplus=True, cu_seqlens=torch.tensor([0, 2, 3]),
        state_batch_indices=torch.tensor([1, 2]),
    )  # fmt: skip
    alone = state[1:2].clone()
    steps = [selective_state_update(alone, x[j, None], dt[j, None], A, B[j, None], C[j, None], dt_softplus=True)
             for j in range(2)]  # fmt: skip
    check(out[:2], torch.cat(steps))
    check(pool[1], alone[0])
    assert torch.equal(pool[[0, 3]], state[[0, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": [0, 2]}, "cu_seqlens: got list, expected"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0])}, "cu_seqlens: got dtype torch.float32, expected an int32 or int64"),
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            r"cu_seqlens: got \[0, 3\], expected values from 0 to 2 that never fall",
        ),
        ({"cu_seqlens": torch.tensor([0, 2, 1])}, r"cu_seqlens: got \[0, 2, 1\], expected values from 0 to 2"),
        (
            {
                "cu_seqlens": torch.tensor([0, 2]),
                "num_accepted_tokens": torch.tensor([1]),
                "state_batch_indices": torch.tensor([[1]]),
            },
            "cu_seqlens: got a sequence of 2 tokens, expected at most 1",
        ),
        ({"num_accepted_tokens": torch.tensor([1, 1])}, "num_accepted_tokens: got a tensor without state_batch_indice"),
        (
            {"num_accepted_tokens": torch.tensor([1, 1]), "state_batch_indices": torch.tensor([1, 2])},
            r"state_batch_indices: got shape \(2,\), expected \(N, tokens\) with num_accepted_tokens",
        ),
        ({"state_batch_indices": torch.tensor([[1, 2]])}, "state_batch_indices: got 1 rows, expected one for each of"),
        ({"out": torch.zeros(1)}, "out: got shape"),
        ({"out": torch.zeros(1), "cu_seqlens": torch.tensor([0, 1, 2])}, "out: got shape"),
        ({"out": [0.0]}, "out: got list"),
        (
            {"state_batch_indices": torch.tensor([[1, 2], [3, SLOTS]])},
            f"state_batch_indices: got {SLOTS}, expected at most {SLOTS - 1}, or less than 0 to skip",
        ),
        ({"dst_state_batch_indices": torch.tensor([0, 5])}, "dst_state_batch_indices: got 5, expected at most 1"),
        ({"dst_state_batch_indices": torch.tensor([1.0, 2.0])}, "dst_state_batch_indices: got dtype torch.float32"),
        ({"intermediate_states_buffer": torch.zeros(2, 0, HEADS, HEADDIM, DSTATE)}, "at least 2 rows and 1 tokens"),
        ({"intermediate_state_indices": torch.tensor([0])}, "intermediate_state_indices: got shape"),
        ({"null_block_id": 0.5}, "null_block_id: got float"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    p = drawn(2)
    if "state_batch_indices" not in options:
        p["state"] = p["state"][:2]
    before = p["state"].clone()
    with pytest.raises((TypeError, ValueError), match=message):
        selective_state_update(**p, dt_softplus=True, **options)
    assert torch.equal(p["state"], before)


def test_gradients_are_refused() -> None:
    p = drawn(2)
    x = p.pop("x").requires_grad_()
    indices = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="x: got gradients"):
        selective_state_update(x=x, **p, state_batch_indices=indices, dst_state_batch_indices=indices)
