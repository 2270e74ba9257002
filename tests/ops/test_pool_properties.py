"""Any calls on rows of a pool of states give each sequence what it has with a state of its own, for every form."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tfla

HEADS, DQK, DHV = 2, 3, 4
FORMS = ("mlstm exp", "mlstm sigmoid", "linear", "normalized", "gla", "delta", "gated delta", "kda")
# (B,) indices of a pool, -1 is padding; a call; the sizes of its sequences or its numbers of steps.
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["packed", "batch", "step", "steps"]),
        st.permutations([0, 1, 2, 3, 4, -1, -1]),
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def tensors(form: str, *leading: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random arguments of an operator or of its steps."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*leading, *shape, generator=generator, dtype=torch.float64)

    x = {"q": randn(HEADS, DQK), "k": randn(HEADS, DQK), "v": randn(HEADS, DHV)}
    if form.startswith("mlstm"):
        return x | {"i": randn(HEADS), "f": randn(HEADS) + 2}
    if form in ("linear", "normalized", "gla"):
        gates = randn(HEADS, DQK) if form == "gla" else randn(HEADS)
        return x | {"log_f": -gates.abs()} | ({"log_i": randn(HEADS)} if form == "normalized" else {})
    x["beta"] = randn(HEADS).sigmoid()
    if form == "delta":
        return x
    return x | {"log_f": -(randn(HEADS, DQK) if form == "kda" else randn(HEADS)).abs()}


def operators(form: str) -> tuple[list[Callable[..., Any]], dict[str, Any]]:
    """Return the operator over sequences, over a step and over a few steps, and the options of all of them."""
    if form.startswith("mlstm"):
        return [tfla.mlstm, tfla.mlstm_step, tfla.mlstm_steps], {"input_gate": form.removeprefix("mlstm ")}
    if form in ("linear", "normalized", "gla"):
        more = {"normalize": True} if form == "normalized" else {}
        return [tfla.linear_attention, tfla.linear_attention_step, tfla.linear_attention_steps], more
    return [tfla.delta_rule, tfla.delta_rule_step, tfla.delta_rule_steps], {"normalize_qk": True}


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert (a - b).norm() <= 1e-10 * b.norm()


def cut(x: dict[str, Tensor], *index: Any) -> dict[str, Tensor]:
    return {name: t[index] for name, t in x.items()}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, seed=st.integers(0, 2**20))
def test_each_sequence_has_what_it_has_alone(
    form: str, calls: list[tuple[str, list[int], list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    (whole, step, steps), more = operators(form)

    def alone(x: dict[str, Tensor], state: tfla.State) -> tuple[Tensor, tfla.State]:
        """Return the outputs of a sequence, which may have no steps, and the state after them."""
        if not x["v"].shape[1]:
            return x["v"], state
        return whole(**x, **more, initial_state=state, return_state=True)  # type: ignore[no-any-return]

    fresh = tfla.State.zeros(1, HEADS, DQK, DHV, normalize=form in ("mlstm exp", "normalized"), dtype=torch.float64)
    own = [fresh.clone() for _ in range(5)]
    pool = tfla.State(*(None if t is None else torch.cat([t] * 5) for t in fresh))
    for kind, order, sizes in calls:
        sizes = [*sizes[:-1], max(sizes[-1], 1)]  # an operator takes one step at least
        rows = order[: len(sizes)]
        indices, B = torch.tensor(rows), len(rows)
        before = pool.clone()
        states = [own[row] if row >= 0 else fresh for row in rows]
        if kind == "packed":
            offsets = torch.tensor([0, *sizes]).cumsum(0)
            x = tensors(form, 1, sum(sizes), generator=generator)
            h, _ = whole(**x, **more, initial_state=pool, state_indices=indices, cu_seqlens=offsets, return_state=True)
            outputs = [h[:, a:b] for a, b in pairwise(offsets.tolist())]
            parts = [cut(x, slice(None), slice(a, b)) for a, b in pairwise(offsets.tolist())]
        else:
            T = 1 if kind == "step" else 1 + sizes[0]
            x = tensors(form, B, T, generator=generator)
            parts = [cut(x, slice(b, b + 1)) for b in range(B)]
            if kind == "batch":
                h, _ = whole(**x, **more, initial_state=pool, state_indices=indices, return_state=True)
            elif kind == "step":
                h, _ = step(**cut(x, slice(None), 0), **more, state=pool, state_indices=indices)
                h = h[:, None]
            else:
                lengths = torch.tensor([size % (T + 1) for size in sizes])
                h, _ = steps(**x, **more, state=pool, state_indices=indices, lengths=lengths)
            outputs = list(h.split(1))
        for b, (row, state, part, output) in enumerate(zip(rows, states, parts, outputs, strict=True)):
            if row < 0 and kind in ("step", "steps"):
                assert not output.any()
                continue
            expected, after = alone(part, state)
            close(output, expected)
            if kind == "steps":
                after = alone(cut(part, slice(None), slice(0, int(lengths[b]))), state)[1]
            if row >= 0:
                own[row] = after
        for row in range(5):
            for found, kept, expected in zip(pool, before, own[row], strict=True):
                if found is None:
                    continue
                if row in rows:
                    close(found[row : row + 1], expected)
                else:
                    assert torch.equal(found[row], kept[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["mlstm exp", "normalized"])
def test_a_max_state_of_16_bits_is_read_but_not_overwritten(form: str, dtype: torch.dtype) -> None:
    """Rounding it would multiply the whole state, which is exp(m) C."""
    (operator, *_), options = operators(form)
    x = {name: t.float() for name, t in tensors(form, 2, 9, generator=torch.Generator().manual_seed(0)).items()}
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        state = operator(**x, **options, return_state=True)[1]
        pool = tfla.State.zeros(3, HEADS, DQK, DHV)
        pool.scatter([2, 0], state)
        pool = pool._replace(m=pool.m.to(dtype))  # type: ignore[union-attr]
        before = pool.clone()
        with pytest.raises(TypeError, match=rf"^initial_state.m: got dtype {dtype}, expected torch.float32"):
            operator(**x, **options, initial_state=pool, state_indices=rows, return_state=True)
        h = operator(**x, **options, initial_state=pool, state_indices=rows)
        own = pool.gather([2, 0])
        expected = operator(**x, **options, initial_state=own._replace(m=own.m.float()))
    torch.testing.assert_close(h, expected)
    assert all(torch.equal(a, b) for a, b in zip(pool, before, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_zeros_of_every_dtype_are_overwritten(dtype: torch.dtype) -> None:
    """The max state of a pool in 16 bits is in float32, so that only C and n are rounded."""
    (operator, *_), options = operators("mlstm exp")
    x = tensors("mlstm exp", 2, 9, generator=torch.Generator().manual_seed(0))
    x = {name: t.to(torch.promote_types(dtype, torch.float32)) for name, t in x.items()}
    pool = tfla.State.zeros(3, HEADS, DQK, DHV, dtype=dtype)
    with torch.no_grad():
        operator(**x, **options, initial_state=pool, state_indices=torch.tensor([2, 0]), return_state=True)
        expected = operator(**x, **options, return_state=True)[1]
    own = pool.gather([2, 0])
    assert own.n is not None
    assert own.C.dtype == own.n.dtype == dtype
    torch.testing.assert_close(own.m, expected.m)
    rounding = max(torch.finfo(dtype).eps, 1e-6)
    for found, exact in ((own.C, expected.C), (own.n, expected.n)):
        assert (found.double() - exact.double()).norm() <= rounding * exact.double().norm()


@pytest.mark.parametrize("sizes", [(HEADS, DQK + 1, DHV), (HEADS + 1, DQK, DHV)])
@pytest.mark.parametrize("form", ["mlstm exp", "gated delta"])
@pytest.mark.parametrize("more", [{}, {"states_every": 4}])
def test_errors_have_the_shape_of_the_pool(form: str, sizes: tuple[int, int, int], more: dict[str, int]) -> None:
    (operator, *_), options = operators(form)
    x = tensors(form, 2, 9, generator=torch.Generator().manual_seed(0))
    pool = tfla.State.zeros(5, *sizes, normalize=form == "mlstm exp")
    message = f"initial_state.C: got shape {(5, *sizes)}, expected {(5, HEADS, DQK, DHV)}"
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(message)):
        operator(
            **x, **options, **more, initial_state=pool, state_indices=torch.tensor([2, 0]), return_state=True
        )  # fmt: skip
