"""A model whose states are rows of a pool: each sequence gets what it gets alone, for all recurrent mixers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_models import RECURRENCES, RECURRENT, build, leaves, same, tokens
from torch import Tensor

from tfla.nn import Decoder, LanguageModel, decode


def model_of(case: str, dtype: torch.dtype = torch.float64, invariant: bool = False) -> LanguageModel:
    if case == "recurrences":
        return build("mlstm_exp", dtype, batch_invariant=invariant, **RECURRENCES)
    return build(case, dtype, batch_invariant=invariant)


def used_pool(model: LanguageModel, size: int, seed: int = 0) -> Any:
    """A pool whose rows have read prompts."""
    ids = torch.randint(0, 29, (size, 6), generator=torch.Generator().manual_seed(seed))
    return model(ids, return_state=True)[1]


def row(pool: Any, index: int) -> Any:
    return tuple(each.gather([index]) for each in pool)


def close(a: Tensor, b: Tensor) -> None:
    tolerance = 1e-5 if b.dtype == torch.float32 else 1e-10
    assert a.shape == b.shape
    a, b = a.double(), b.double()
    assert (a - b).norm() <= tolerance * b.norm()


@pytest.fixture(params=[*RECURRENT, "recurrences"])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("indices", [(5, -1, 0, 3), (2,), (-1, -1)])
def test_calls_read_and_overwrite_their_rows(case: str, invariant: bool, indices: tuple[int, ...]) -> None:
    """A prefill, one step and a few steps of which some are accepted: rows of others keep their bits."""
    model, rows, B = model_of(case, invariant=invariant), torch.tensor(indices), len(indices)
    pool = used_pool(model, 7)
    before = tuple(each.clone() for each in pool)
    alone = [row(pool, i) if i >= 0 else model.initial_state(1) for i in indices]
    prompt, token, proposed = tokens(B, 20), tokens(B), tokens(B, 3)
    lengths = torch.arange(B) % 4

    hidden, after = model.hidden(prompt, pool, state_indices=rows, return_state=True)
    assert after is pool or all(a is b for a, b in zip(after, pool, strict=True))
    logits, _ = model.step(token, pool, state_indices=rows.int())
    several, accept = model.steps(proposed, pool, state_indices=rows)
    accept(lengths)
    for b, (index, state) in enumerate(zip(indices, alone, strict=True)):
        own, state = model.hidden(prompt[b : b + 1], state, return_state=True)
        close(hidden[b : b + 1], own)
        if index < 0:
            continue
        own, state = model.step(token[b : b + 1], state)
        close(logits[b : b + 1], own)
        own, accept = model.steps(proposed[b : b + 1], state)
        close(several[b : b + 1], own)
        for found, expected in zip(leaves(row(pool, index)), leaves(accept(lengths[b : b + 1])), strict=True):
            close(found, expected)
    for other in set(range(7)) - set(indices):
        same(row(pool, other), row(before, other))


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
def test_rows_are_only_read_where_no_state_is_returned(case: str, invariant: bool) -> None:
    model, rows = model_of(case, invariant=invariant), torch.tensor([4, 1])
    pool = used_pool(model, 5)
    before = tuple(each.clone() for each in pool)
    hidden, nothing = model.hidden(tokens(2, 9), pool, state_indices=rows)
    assert nothing == ()
    close(hidden, model.hidden(tokens(2, 9), tuple(each.gather(rows) for each in pool))[0])
    model.steps(tokens(2, 3), pool, state_indices=rows)
    same(pool, before)


@torch.no_grad()
def test_packed_prompts_and_states_in_between(case: str) -> None:
    model, rows = model_of(case), torch.tensor([3, -1, 0])
    pool, ids, cuts = used_pool(model, 4), tokens(1, 24), [0, 5, 12, 24]
    alone = [row(pool, 3), model.initial_state(1), row(pool, 0)]
    own_pool = tuple(each.clone() for each in pool)
    hidden, _ = model.hidden(ids, pool, cu_seqlens=torch.tensor(cuts), state_indices=rows, return_state=True)
    for index, state, (a, b) in zip(rows.tolist(), alone, itertools.pairwise(cuts), strict=True):
        own, state = model.hidden(ids[:, a:b], state, return_state=True)
        close(hidden[:, a:b], own)
        if index >= 0:
            for found, expected in zip(leaves(row(pool, index)), leaves(state), strict=True):
                close(found, expected)
    _, _, between = model.prefill(ids, own_pool, states_every=10, state_indices=rows[:1])
    _, state, expected = model.prefill(ids, alone[0], states_every=10)
    same(between, expected)
    same(row(own_pool, 3), state)


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(6)), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_decoder_serves_any_rows_in_any_order(order: list[int], sizes: list[int]) -> None:
    """Each sequence has the logits of its own decoder, whatever the batches are that it has been in."""
    model = model_of("recurrences")
    pool = used_pool(model, 6)
    alone = [Decoder(model, row(pool, i)) for i in range(6)]
    decoder = Decoder(model, pool, batches=(2, 6))
    assert decoder.state is pool
    for number, size in enumerate(sizes):
        rows, ids = order[:size], (torch.arange(size) + 3 * number) % 29
        logits = decoder.step(ids, torch.tensor(rows))
        for b, index in enumerate(rows):
            close(logits[b : b + 1], alone[index].step(ids[b : b + 1]))
        order = order[1:] + order[:1]


class Recorded:
    """A CUDA graph on a CPU: a replay makes the call again, into the tensor that the first one has returned."""

    def __init__(self, call: Callable[[], Tensor], result: Tensor) -> None:
        self.call, self.result = call, result

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.result.copy_(self.call())


@torch.no_grad()
def test_graphs_pad_a_step_to_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding changes no row, and captures change none; a graph keeps what it calls."""

    def capture_graph(call: Callable[[], Tensor], device: object, pool: object) -> tuple[Recorded, Tensor]:
        result = call()
        return Recorded(call, result), result

    monkeypatch.setattr(decode, "capture_graph", capture_graph)
    model = model_of("recurrences")
    pool = used_pool(model, 6)
    expected = tuple(each.clone() for each in pool)
    decoder = Decoder(model, pool, batches=(2, 4))
    decoder._pooled = {size: decode.PooledGraph(decoder, size, None) for size in (2, 4)}
    same(pool, expected)
    for rows in ([5, 1, 0], [3], [2, 5, 4, 1], [1, 5], [0, -1]):
        ids, indices = torch.arange(len(rows)), torch.tensor(rows)
        logits = decoder.step(ids, indices)
        reference, _ = model.step(ids, expected, state_indices=indices)
        close(logits[indices >= 0], reference[indices >= 0])
        for ours, theirs in zip(leaves(pool), leaves(expected), strict=True):
            close(ours, theirs)


@torch.no_grad()
def test_rows_are_moved_and_reset() -> None:
    model, ids = model_of("gated_delta_net"), tokens(2)
    decoder = Decoder(model, used_pool(model, 4), batches=[2])
    first = decoder.gather([1])
    decoder.scatter([3], first)
    decoder.reset([0])
    logits = decoder.step(ids, torch.tensor([0, 3]))
    close(logits[:1], model.step(ids[:1], model.initial_state(1))[0])
    close(logits[1:], model.step(ids[1:], first)[0])


@torch.no_grad()
def test_a_pool_may_have_a_narrower_dtype() -> None:
    """C and n in bfloat16 are read in float32 by prompts and steps, and rounded where they are written."""
    model, rows = model_of("mlstm_exp", torch.float32), torch.tensor([2, 0])
    pool = tuple(s._replace(C=s.C.bfloat16(), n=s.n.bfloat16()) for s in used_pool(model, 3))
    wide = tuple(s._replace(C=s.C.float(), n=s.n.float()) for s in (each.gather(rows) for each in pool))
    hidden, after = model.hidden(tokens(2, 9), pool, state_indices=rows, return_state=True)
    expected, _ = model.hidden(tokens(2, 9), wide)
    close(hidden, expected)
    assert after[0].C.dtype == torch.bfloat16
    assert model.step(tokens(2), pool, state_indices=rows)[0].isfinite().all()


def test_what_does_not_fit_is_an_error() -> None:
    model = model_of("mlstm_exp")
    pool, ids, two = model.initial_state(3), tokens(2), torch.tensor([0, 1])

    def step(rows: Any, state: Any = pool) -> None:
        with torch.no_grad():
            model.step(ids, state, state_indices=rows)

    with pytest.raises(ValueError, match="state_indices: got 1 more than once"):
        step(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="state_indices: got 3, expected -1 or from 0 to 2"):
        step(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"state_indices: got shape \(1,\), expected \(2\)"):
        step(torch.tensor([0]))
    with pytest.raises(TypeError, match="state_indices: got list"):
        step([0, 1])
    with pytest.raises(ValueError, match=r"state\[1\]: got 2 rows, expected 3 as in state\[0\]"):
        step(two, (pool[0], model.initial_state(2)[1]))
    with pytest.raises(ValueError, match="state_indices: got rows without a state"):
        model.hidden(tokens(2, 5), state_indices=two)
    with pytest.raises(ValueError, match="state_indices: got them while gradients are recorded"):
        model.hidden(tokens(2, 5), pool, state_indices=two, return_state=True)
    attention = build("attention")
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=r"state\[0\]: got a cache that grows in a pool, expected one with"),
    ):
        attention.step(ids, attention.initial_state(2), state_indices=two)
    with pytest.raises(TypeError, match=r"state\[0\]: got a cache that grows"):
        Decoder(attention, attention.initial_state(2), batches=[2])
    for batches, kind in ((4, TypeError), ([], TypeError), ([0], ValueError), ("4", TypeError)):
        with pytest.raises(kind, match="batches: got"):
            Decoder(model, pool, batches=batches)
    decoder = Decoder(model, pool, batches=[1])
    with pytest.raises(ValueError, match="state_indices: got None, expected the rows"):
        decoder.step(ids)
    with pytest.raises(ValueError, match="ids: got 2 sequences, expected at most 1, the largest of batches"):
        decoder.step(ids, two)
    with pytest.raises(ValueError, match="state_indices: got rows of a pool, expected None for a Decoder"):
        Decoder(model, pool).step(tokens(3), torch.arange(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("case", [*RECURRENT, "recurrences"])
def test_graphs_of_several_batches_share_a_pool(case: str) -> None:
    """Steps of graphs, a prefill between them, and rows that come and go; the host never waits."""
    model = model_of(case, torch.float32).cuda()
    start = model(tokens(6, 8).cuda(), return_state=True)[1]
    pool = tuple(each.clone() for each in start)
    decoder = Decoder(model, pool, batches=(1, 2, 4))
    assert set(decoder._pooled) == {1, 2, 4}
    same(pool, start)  # the capture has left all rows as they were
    alone = [Decoder(model, row(start, i), cuda_graph=False) for i in range(6)]
    for rows in ([3], [5, 0], [2, 3, 1], [0, 4, 5, 1]):
        ids, indices = torch.arange(len(rows)).cuda(), torch.tensor(rows).cuda()
        torch.cuda.set_sync_debug_mode("error")
        logits = decoder.step(ids, indices)
        torch.cuda.set_sync_debug_mode("default")
        for b, index in enumerate(rows):
            assert (logits[b] - alone[index].step(ids[b : b + 1])[0]).norm() <= 1e-4 * logits[b].norm()
    prompt, one = tokens(1, 50).cuda(), torch.tensor([4]).cuda()
    model.hidden(prompt, pool, state_indices=one, return_state=True)
    _, state = model.hidden(prompt, alone[4].state, return_state=True)
    logits = decoder.step(one, one)
    expected = model.step(one, state)[0]
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
