"""Caches of attention as rows of a pool: each sequence gets what it gets alone, also in hybrids."""

from __future__ import annotations

import pytest
import torch
from invariant_models import build, tokens
from torch import Tensor

from tfla.nn import Decoder, KeyValues, LanguageModel, decode

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

    def captured(call: object, device: object, pool: object) -> tuple[Recorded, Tensor]:
        result = call()  # type: ignore[operator]
        return Recorded(call, result), result

    monkeypatch.setattr(decode, "captured", captured)
    served = Texts(build("hybrid", torch.float64), 5)
    served.prefill([3, 0], 6)
    decoder = Decoder(served.model, served.pool, batches=(2, 4))
    decoder._pooled = {size: decode.PooledGraph(decoder, size, None) for size in (2, 4)}
    for rows in ([3], [0, 4, 1], [2, 3]):
        ids = tokens(len(rows))
        logits = decoder.step(ids, torch.tensor(rows))
        served.check(rows, ids[:, None], logits[:, None])


@torch.no_grad()
def test_what_has_no_room_is_an_error() -> None:
    served, row = Texts(build("attention", torch.float64), 2), torch.tensor([1])
    served.prefill([1], ROOM - 1)
    served.step([1])
    with pytest.raises(
        ValueError, match="state: got a sequence with room for fewer than 1 more tokens, expected a pool"
    ):
        served.model.step(tokens(1), served.pool, state_indices=row)
    with pytest.raises(ValueError, match="state: got 42 tokens of a sequence, expected at most 40, the capacity"):
        served.model.hidden(tokens(1, 2), served.pool, state_indices=row, return_state=True)
    long = served.model(tokens(1, ROOM + 1), return_state=True)[1]
    with pytest.raises(ValueError, match="state: got 41 tokens of a sequence, expected at most 40, the capacity"):
        Decoder(served.model, served.pool, batches=[1]).scatter([0], long)
    assert isinstance(served.pool[0], KeyValues)
    with pytest.raises(ValueError, match="capacity: got 0, expected at least 1"):
        served.model.initial_state(2, capacity=0)


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
