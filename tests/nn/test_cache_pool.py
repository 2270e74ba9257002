"""Caches of attention as rows of a pool: each sequence gets what it gets alone, also in hybrids."""

from __future__ import annotations

import pytest
import torch
from invariant_models import build, leaves, tokens
from torch import Tensor

import tfla.nn.pool
from tfla.nn import Decoder, KeyValues, LanguageModel, decode
from tfla.nn.mixers import attention, key_values

CASES = ("attention", "window and sinks", "hybrid")
ROOM = 40


class Texts:
    """A pool of a model's states beside the tokens that each of its rows has read."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self.model, self.pool = model, model.initial_state(rows, capacity=ROOM)
        self.texts = [torch.zeros(0, dtype=torch.int64) for _ in range(rows)]

    def check(self, rows: list[int], ids: Tensor, logits: Tensor, start: bool = False) -> None:
        """Compare logits (B, T, vocab_size) of tokens (B, T) with those of the whole texts, and keep the tokens."""
        for b, row in enumerate(rows):
            if row >= 0 or start:
                text = torch.cat([self.texts[row], ids[b]]) if row >= 0 else ids[b]
                expected = self.model(text[None])[0, -ids.shape[1] :]
                assert (logits[b] - expected).norm() <= 1e-10 * expected.norm()
            if row >= 0:
                self.texts[row] = text

    def prefill(self, rows: list[int], count: int) -> None:
        ids = tokens(len(rows), count)
        hidden, after = self.model.hidden(ids, self.pool, state_indices=torch.tensor(rows), return_state=True)
        assert all(a is b for a, b in zip(after, self.pool, strict=True))
        self.check(rows, ids, self.model.logits(hidden), start=True)

    def step(self, rows: list[int]) -> None:
        ids = tokens(len(rows))
        logits, _ = self.model.step(ids, self.pool, state_indices=torch.tensor(rows, dtype=torch.int32))
        self.check(rows, ids[:, None], logits[:, None])

    def steps(self, rows: list[int], count: int, lengths: list[int]) -> None:
        ids = tokens(len(rows), count)
        before = list(self.texts)
        logits, accept = self.model.steps(ids, self.pool, state_indices=torch.tensor(rows))
        self.check(rows, ids, logits)
        accept(torch.tensor(lengths))
        for b, row in enumerate(rows):
            if row >= 0:
                self.texts[row] = torch.cat([before[row], ids[b, : lengths[b]]])


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rows_continue_their_own_texts(case: str, invariant: bool) -> None:
    """Rows of several lengths share prefills, steps and proposals, of which some are accepted, with padding."""
    served = Texts(build(case, torch.float64, batch_invariant=invariant), 5)
    served.prefill([3, 0], 6)
    served.step([0, -1, 3, 4])
    served.prefill([1], 9)
    served.steps([1, 3, -1, 2], 3, [2, 0, 1, 3])
    served.prefill([4, 1, -1, 3], 5)
    served.step([3, 2, 1, 0])
    served.step([-1, -1])
    served.step([1, 4])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_packed_prompts_go_into_empty_rows(case: str) -> None:
    served, ids = Texts(build(case, torch.float64), 4), tokens(1, 12)
    rows, offsets = torch.tensor([2, -1, 0]), torch.tensor([0, 5, 7, 12])
    hidden, _ = served.model.hidden(ids, served.pool, cu_seqlens=offsets, state_indices=rows, return_state=True)
    logits = served.model.logits(hidden)
    served.check([2], ids[:, :5], logits[:, :5])
    served.check([0], ids[:, 7:], logits[:, 7:])
    served.step([0, 2, 1])
    with pytest.raises(ValueError, match="cu_seqlens, state: got both, expected at most one of them in attention"):
        served.model.hidden(ids, served.pool, cu_seqlens=offsets, state_indices=rows, return_state=True)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_states_of_prefixes_are_given_to_rows(case: str) -> None:
    served, ids = Texts(build(case, torch.float64), 3), tokens(1, 11)
    decoder = Decoder(served.model, served.pool, batches=[1, 3])
    _, _, between = served.model.prefill(ids, served.pool, states_every=4, state_indices=torch.tensor([1]))
    decoder.scatter([2], between[1])
    served.texts[1], served.texts[2] = ids[0], ids[0, :8]
    served.prefill([2], 4)
    served.step([1, 2])
    decoder.reset([1])
    served.texts[1] = ids[0, :0]
    served.prefill([1], 2)
    decoder.scatter([0], decoder.gather([2]))
    served.texts[0] = served.texts[2]
    new = tokens(3)
    logits = decoder.step(new, torch.tensor([2, 0, 1]))
    served.check([2, 0, 1], new[:, None], logits[:, None])


@torch.no_grad()
def test_graphs_pad_steps_of_a_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph stands for a call with tensors at fixed addresses; its padding changes no row."""

    class Recorded:
        def __init__(self, call: object, result: Tensor) -> None:
            self.call, self.result = call, result

        def pool(self) -> None:
            return None

        def replay(self) -> None:
            self.result.copy_(self.call())  # type: ignore[operator]

    def capture_graph(call: object, device: object, pool: object) -> tuple[Recorded, Tensor]:
        result = call()  # type: ignore[operator]
        return Recorded(call, result), result

    monkeypatch.setattr(decode, "capture_graph", capture_graph)
    served = Texts(build("hybrid", torch.float64), 5)
    served.prefill([3, 0], 6)
    decoder = Decoder(served.model, served.pool, batches=(2, 4))
    decoder._pooled = {size: decode.PooledGraph(decoder, size, None) for size in (2, 4)}
    for rows in ([3], [0, 4, 1], [2, 3]):
        ids = tokens(len(rows))
        logits = decoder.step(ids, torch.tensor(rows))
        served.check(rows, ids[:, None], logits[:, None])


@torch.no_grad()
@pytest.mark.parametrize("case", ["attention", "hybrid"])
def test_what_has_no_room_is_an_error(case: str) -> None:
    """An error leaves all rows of all blocks as they are."""
    served, row = Texts(build(case, torch.float64), 2), torch.tensor([1])
    model, pool = served.model, served.pool
    served.prefill([1], ROOM - 1)
    served.step([1])
    before = [t.clone() for t in leaves(pool)]
    few = "state: got a sequence with room for fewer than {} more tokens, expected a pool"
    many = "state: got {} tokens of a sequence, expected at most 40, the capacity"
    both = torch.tensor([0, 1])
    start = torch.zeros(1, ROOM + 3, dtype=torch.bool)
    start[0, 2] = True
    for call, message in (
        (lambda: model.step(tokens(1), pool, state_indices=row), few.format(1)),
        (lambda: model.steps(tokens(2, 2), pool, state_indices=both), few.format(2)),
        (lambda: model.hidden(tokens(1, 2), pool, state_indices=row, return_state=True), many.format(42)),
        (lambda: model.prefill(tokens(1, 2), pool, state_indices=row, states_every=1), many.format(42)),
        (
            lambda: model.hidden(
                tokens(1, ROOM + 3), pool, state_indices=row, return_state=True, document_start=start
            ),
            many.format(41),
        ),
        (
            lambda: model.hidden(
                tokens(1, 45), pool, state_indices=both.flip(0) - 1, return_state=True,
                cu_seqlens=torch.tensor([0, 41, 45]),
            ),
            many.format(41),
        ),
        (
            lambda: model.hidden(
                tokens(1, 5), pool, state_indices=both, return_state=True, cu_seqlens=torch.tensor([0, 2, 5])
            ),
            "cu_seqlens, state: got both",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
        assert all(torch.equal(t, old) for t, old in zip(leaves(pool), before, strict=True))
    long = model(tokens(1, ROOM + 1), return_state=True)[1]
    with pytest.raises(ValueError, match="state: got 41 tokens of a sequence, expected at most 40, the capacity"):
        Decoder(model, pool, batches=[1]).scatter([0], long)
    short = model(tokens(2, 3), return_state=True)[1]
    assert isinstance(pool[-1], KeyValues)
    with pytest.raises(ValueError, match=r"states.k: got shape \(2, 3, .*, expected \(1, 3, "):
        pool[-1].scatter([0], short[-1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows: got 1 more than once, expected each sequence once"):
        pool[-1].scatter([1, 1], short[-1])  # type: ignore[arg-type]
    assert all(torch.equal(t, old) for t, old in zip(leaves(pool), before, strict=True))
    with pytest.raises(ValueError, match="capacity: got 0, expected at least 1"):
        model.initial_state(2, capacity=0)
    with pytest.raises(ValueError, match="capacity: got 9 with batches, expected None"):
        Decoder(model, pool, batches=[1], capacity=9)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_document_of_which_the_cache_has_room_goes_into_a_full_row(case: str) -> None:
    """A new document and a window leave out tokens, for which no room is needed."""
    served, row = Texts(build(case, torch.float64), 2), torch.tensor([1])
    served.prefill([1], ROOM)
    ids, start = tokens(1, ROOM + 3), torch.zeros(1, ROOM + 3, dtype=torch.bool)
    start[0, [1, 3]] = True
    served.model.hidden(ids, served.pool, state_indices=row, return_state=True, document_start=start)
    served.texts[1] = ids[0, 3:]
    if case == "window and sinks":
        served.prefill([1], 2)
        served.step([1])


@pytest.mark.parametrize("case", CASES)
def test_recorded_gradients_are_an_error(case: str) -> None:
    """No graph of autograd gets into the pool, and no row changes."""
    model, row = build(case, torch.float64), torch.tensor([1])
    pool = model.initial_state(2, capacity=ROOM)
    before = [t.clone() for t in leaves(pool)]
    for call in (
        lambda: model.step(tokens(1), pool, state_indices=row),
        lambda: model.steps(tokens(1, 2), pool, state_indices=row)[1](torch.tensor([1])),
        lambda: model.hidden(tokens(1, 2), pool, state_indices=row, return_state=True),
    ):
        with pytest.raises(ValueError, match="state_indices: got them while gradients are recorded, expected"):
            call()
        assert not any(t.requires_grad for t in leaves(pool))
        assert all(torch.equal(t, old) for t, old in zip(leaves(pool), before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_states_go_to_decoders_of_another_capacity(case: str) -> None:
    """What counts is the number of tokens, and not the room around them."""
    model, ids = build(case, torch.float64), tokens(2, 9)
    large, small = (Decoder(model, model.initial_state(2), capacity=n) for n in (80, 40))
    for t in range(5):
        large.step(ids[:, t])
    small.scatter([0], large.gather([1]))
    logits = small.step(ids[[1, 0], 5])
    expected = model(ids[1:, :6])[0, -1]
    assert (logits[0] - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("case", ["attention", "window and sinks"])
def test_a_state_with_gradients_is_given_to_a_row(case: str) -> None:
    """A decoder takes the state of a prompt that was read with gradients, and records none."""
    model, ids = build(case, torch.float64), tokens(1, 5)
    decoder = Decoder(model, model.initial_state(2), capacity=9)
    decoder.scatter([1], model(ids[:, :4], return_state=True)[1])
    assert not any(t.requires_grad for t in leaves(decoder.state))
    logits = decoder.step(torch.cat([ids[0, 4:], ids[0, 4:]]))
    expected = model(ids)[0, -1]
    assert (logits[1] - expected).norm() <= 1e-10 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_states_of_prefixes_leave_their_padding_behind(case: str) -> None:
    """A row without tokens that shares a prefill with a long one has its own tokens only."""
    served = Texts(build(case, torch.float64), 3)
    served.prefill([0], 30)
    ids = tokens(2, 5)
    _, _, between = served.model.prefill(ids, served.pool, states_every=5, state_indices=torch.tensor([0, 1]))
    decoder = Decoder(served.model, served.model.initial_state(2), capacity=36)
    decoder.scatter([0, 1], between[0])
    cache = decoder.state[-1]
    assert isinstance(cache, KeyValues)
    assert cache.length is not None
    assert cache.length[1] <= 5
    assert decoder.capacity == 36
    assert decoder._used[1] <= 5
    new = tokens(2)
    logits = decoder.step(new)
    expected = served.model(torch.cat([ids[1], new[1:]])[None])[0, -1]
    assert (logits[1] - expected).norm() <= 1e-10 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_capacity_is_room_for_the_tokens_of_documents(case: str, packed: bool) -> None:
    """What is before a document, padding or another document, takes no room of a decoder's copy of a state."""
    model, ids, lengths = build(case, torch.float64), tokens(2, 20), (12, 3)
    if packed:
        prompt = torch.cat([ids[0, : lengths[0]], ids[1, : lengths[1]]])[None]
        _, state = model.hidden(prompt, cu_seqlens=torch.tensor([0, 12, 15]), return_state=True)
    else:
        prompt, starts = ids[:, : lengths[0]].clone(), torch.zeros(2, 12, dtype=torch.bool)
        prompt[1, 9:], starts[1, 9] = ids[1, : lengths[1]], True
        _, state = model.hidden(prompt, document_start=starts, return_state=True)
    decoder = Decoder(model, state, capacity=16)
    for t in range(4):
        logits = decoder.step(torch.stack([ids[b, lengths[b] + t] for b in range(2)]))
    for b in range(2):
        expected = model(ids[b : b + 1, : lengths[b] + 4])[0, -1]
        assert (logits[b] - expected).norm() <= 1e-10 * expected.norm()
    short = Decoder(model, tuple(each.gather([1]) for each in decoder.state), capacity=8)
    logits = short.step(ids[1:, 7])
    expected = model(ids[1:, :8])[0, -1]
    assert (logits[0] - expected).norm() <= 1e-10 * expected.norm()
    cache = decoder.state[-1]
    assert isinstance(cache, KeyValues)
    with pytest.raises(ValueError, match=r"^capacity: got 6, expected at least \d+, the tokens of a sequence"):
        cache.reserve(6)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_decoder_has_the_capacity_of_its_state(case: str) -> None:
    model, ids = build(case, torch.float64), tokens(2, 4)
    decoder, state = Decoder(model, model.initial_state(2, capacity=3)), model.initial_state(2, capacity=3)
    for t in range(3):
        logits = decoder.step(ids[:, t])
        state = model.step(ids[:, t], state)[1]
    expected = model(ids[:, :3])[:, -1]
    assert (logits - expected).norm() <= 1e-10 * expected.norm()
    with pytest.raises(ValueError, match="ids: got token number 4 of a sequence, expected at most 3, the capacity"):
        decoder.step(ids[:, 3])
    before = [t.clone() for t in leaves(state)]
    for in_place in (False, True):
        with pytest.raises(ValueError, match="state: got a sequence with room for fewer than 1 more tokens"):
            model.step(ids[:, 3], state, in_place=in_place)
    assert all(torch.equal(t, old) for t, old in zip(leaves(state), before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_refused_calls_take_no_room(case: str) -> None:
    """A decoder counts tokens only of steps and states that its caches have got."""
    model, ids = build(case, torch.float64), tokens(2, 6)
    _, state = model(ids[:, :3], return_state=True)
    decoder = Decoder(model, state, capacity=5)
    with pytest.raises(ValueError, match="ids: got tokens from"):
        decoder.step(torch.full((2,), 10_000))
    _, longer = model(ids[:, :5], return_state=True)
    for rows, message in (([2, 0], "rows: got 2"), ([-1, 0], "rows: got -1"), ([0, 0], "rows: got 0 more than once")):
        with pytest.raises(ValueError, match=message):
            decoder.scatter(rows, longer)
    found = torch.stack([decoder.step(ids[:, t]) for t in (3, 4)], 1)
    expected = model(ids[:, :5])[:, 3:]
    assert (found - expected).norm() <= 1e-10 * expected.norm()
    with pytest.raises(ValueError, match="ids: got token number 6"):
        decoder.step(ids[:, 5])


@torch.no_grad()
@pytest.mark.parametrize("pooled", [False, True])
def test_what_a_gpu_has_no_room_for_is_nan(pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host reads no lengths, as on a GPU, a full row keeps its tokens and their number."""
    model, indices = build("attention", torch.float64, batch_invariant=False), torch.tensor([1, 0])
    pool, ids = model.initial_state(2, capacity=6), tokens(2, 9)
    model.hidden(ids[:1, :5], pool, state_indices=torch.tensor([1]), return_state=True)
    model.hidden(ids[1:, :2], pool, state_indices=torch.tensor([0]), return_state=True)
    state = pool if pooled else tuple(each.gather([1, 0]) for each in pool)  # type: ignore[arg-type]
    full = 1 if pooled else 0
    before = [each.gather([full]) for each in state]  # type: ignore[arg-type]
    monkeypatch.setattr(attention, "reads_values", lambda t: False)
    monkeypatch.setattr(key_values, "reads_values", lambda t: False)
    monkeypatch.setattr(tfla.nn.pool, "reads_values", lambda t: False)
    rows = {"state_indices": indices} if pooled else {"in_place": True}
    logits, accept = model.steps(ids[:, 5:7], state, **rows)  # type: ignore[arg-type]
    state = accept(torch.tensor([2, 2]))
    assert logits[0].isnan().all()
    expected = model(torch.cat([ids[1, :2], ids[1, 5:7]])[None])[0, -2:]
    assert (logits[1] - expected).norm() <= 1e-10 * expected.norm()
    for each, old in zip(state, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(each.gather([full]), old, strict=True))  # type: ignore[arg-type]
    if pooled:
        monkeypatch.undo()
        hidden, _ = model.hidden(ids[:1, 5:6], pool, state_indices=torch.tensor([1]))
        expected = model(ids[:1, :6])[0, -1]
        assert (model.logits(hidden)[0, -1] - expected).norm() <= 1e-10 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_of_no_sequence_is_empty(invariant: bool) -> None:
    model = build("attention", torch.float64, batch_invariant=invariant)
    pool, none = model.initial_state(2, capacity=ROOM), torch.zeros(0, dtype=torch.int64)
    before = [t.clone() for t in leaves(pool)]
    logits, _ = model.step(none, pool, state_indices=none)
    assert logits.shape == (0, 29)
    assert all(torch.equal(t, old) for t, old in zip(leaves(pool), before, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_graph_serves_a_hybrid() -> None:
    model = build("hybrid", torch.float32).cuda()
    pool, ids = model.initial_state(4, capacity=ROOM), tokens(2, 9).cuda()
    decoder = Decoder(model, pool, batches=(1, 2, 4))
    assert set(decoder._pooled) == {1, 2, 4}
    rows = torch.tensor([3, 1]).cuda()
    model.hidden(ids[:, :6], pool, state_indices=rows, return_state=True)
    expected = model(ids)
    for t in range(6, 9):
        torch.cuda.set_sync_debug_mode("error")
        logits = decoder.step(ids[:, t], rows)
        torch.cuda.set_sync_debug_mode("default")
        assert (logits - expected[:, t]).norm() <= 1e-4 * expected[:, t].norm()
