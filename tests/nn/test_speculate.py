"""Speculative decoding: the same tokens as without it, and the same distribution."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tfla.nn import LanguageModel, NGram, generate
from tfla.nn.decode import stepped_tensors
from tfla.nn.drafts import Lookup
from tfla.nn.mixers.key_values import KeyValues
from tfla.nn.sampling import Sampling
from tfla.nn.speculate import SpeculativeTexts, accept_proposals

Make = Callable[..., LanguageModel]
EVERY = ["mlstm_exp", "mlstm_sig", "attention", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net", "kda"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "speculate.py"
HYBRID: dict[str, Any] = {"layers": ["gated_delta_net", "attention"], "window": 8, "num_kv_heads": 1}


def models(make_model: Make) -> list[LanguageModel]:
    return [*(make_model(mixer) for mixer in EVERY), make_model(**HYBRID)]


def text(model: LanguageModel, ids: Tensor, n: int = 17, **options: Any) -> Tensor:
    return torch.stack(list(generate(model, ids, n, **options)), 1)


def test_a_few_steps_are_a_forward_and_the_state_follows_the_accepted_ones(
    make_model: Make, ids: Tensor, close: Callable[[Tensor, Tensor], None]
) -> None:
    """Each sequence accepts another number of tokens, and goes on from there as a whole forward does."""
    lengths = torch.tensor([2, 5])
    for model in models(make_model):
        with torch.no_grad():
            _, state = model(ids[:, :9], return_state=True)
            state = tuple(s.reserve(30) if isinstance(s, KeyValues) else s for s in state)
            logits, accept = model.steps(ids[:, 9:14], state)
            close(logits, model(ids[:, :14])[:, 9:])
            state, rows = accept(lengths), torch.arange(2)
            for ahead in range(3):
                logits, state = model.step(ids[rows, 9 + lengths + ahead], state)
                for row, length in enumerate(lengths.tolist()):
                    close(logits[row], model(ids[row : row + 1, : 10 + length + ahead])[0, -1])


def test_greedy_tokens_are_those_without_a_draft(make_model: Make, ids: Tensor) -> None:
    for model in models(make_model):
        expected = text(model, ids, temperature=0)
        for draft in (NGram(2), make_model("mlstm_sig", seed=1), model):
            for count in (1, 4):
                assert torch.equal(text(model, ids, temperature=0, draft=draft, draft_tokens=count), expected)


@pytest.mark.parametrize("top_p", [1e-9, 1e-50, 1e-320])
def test_the_smallest_top_p_takes_the_likeliest_tokens(make_model: Make, ids: Tensor, top_p: float) -> None:
    """Also one that float32 rounds to 0."""
    model = make_model().float()
    expected = text(model, ids, temperature=0)
    for draft in (None, NGram(2), make_model("mlstm_sig", seed=1).float()):
        assert torch.equal(text(model, ids, top_p=top_p, draft=draft), expected)


def test_the_model_accepts_all_of_its_own_greedy_proposals(
    make_model: Make, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens after the first one are four rounds of four tokens."""
    model, calls = make_model(), []
    steps = LanguageModel.steps
    monkeypatch.setattr(
        LanguageModel, "steps", lambda self, *x, **o: (calls.append(len(calls)), steps(self, *x, **o))[1]
    )
    text(model, ids, temperature=0, draft=model, draft_tokens=3)
    assert len(calls) == 4


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.5}], ids=str)
def test_any_draft_leaves_the_distribution(options: dict[str, Any]) -> None:
    """The joint distribution of two tokens of a model without memory, over a table of its logits."""
    draw = torch.Generator().manual_seed(0)
    N, V = 200_000, 4
    p_logits = torch.randn(3, V, generator=draw)
    q_logits = p_logits[:2] + 0.7 * torch.randn(2, V, generator=draw)
    sampling = Sampling(options.get("temperature", 1.0), options.get("top_k"), options.get("top_p"), draw)
    exact = sampling.probabilities(p_logits)
    for certain in (False, True):
        q = sampling.probabilities(q_logits)
        proposed = torch.stack([sampling.draw_from(row.expand(N, -1)) for row in q], 1)
        if certain:
            proposed = exact[:2].argmax(-1).expand(N, -1)
        given = None if certain else q.expand(N, -1, -1)
        accepted, after = accept_proposals(p_logits.expand(N, -1, -1), proposed, given, sampling)
        tokens = torch.cat([proposed, proposed[:, :1]], 1).scatter(1, accepted[:, None], after[:, None])
        assert set(accepted.tolist()) == {0, 1, 2}
        first = torch.bincount(tokens[:, 0], minlength=V) / N
        torch.testing.assert_close(first, exact[0], rtol=0, atol=5e-3)
        second = tokens[accepted >= 1, 1]  # where the first proposal was accepted, the second token is free of it
        torch.testing.assert_close(torch.bincount(second, minlength=V) / len(second), exact[1], rtol=0, atol=1e-2)
        third = tokens[accepted == 2, 2]
        torch.testing.assert_close(torch.bincount(third, minlength=V) / len(third), exact[2], rtol=0, atol=2e-2)


@pytest.mark.parametrize("top_p", [None, 0.6])
def test_probabilities_are_those_of_draws(top_p: float | None) -> None:
    """Ranks are left out where nothing is cut off; draws are those of torch.multinomial."""
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = Sampling(0.7, None, top_p, None).probabilities(logits)
    torch.testing.assert_close(p, Sampling(0.7, 50, top_p, None).probabilities(logits), rtol=1e-12, atol=0)
    for seed in range(20):
        draws = [torch.Generator().manual_seed(seed) for _ in range(2)]
        expected = torch.multinomial(p[0], 1, generator=draws[0])[:, 0]
        assert torch.equal(Sampling(0.7, None, top_p, draws[1]).draw_from(p[0]), expected)


def test_samples_with_and_without_a_draft_are_alike(make_model: Make) -> None:
    """The second token of many equal prompts, given all first ones."""
    model, prompt = make_model(dtype=torch.float32, vocab_size=5), torch.tensor([[1, 2, 1]]).expand(4000, -1)
    draft = make_model("mlstm_sig", seed=1, dtype=torch.float32, vocab_size=5)
    plain = text(model, prompt, 3, seed=0)
    for source in (draft, NGram(1)):
        found = text(model, prompt, 3, seed=1, draft=source, draft_tokens=2)
        for column in range(3):
            a, b = (torch.bincount(t[:, column], minlength=5) / 4000 for t in (plain, found))
            torch.testing.assert_close(a, b, rtol=0, atol=0.04)


def test_stop_token_and_stream(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    free = text(model, ids, 30, temperature=0)
    stop = int(free[0, 6])
    expected = text(model, ids, 30, temperature=0, stop_token=stop)
    assert torch.equal(text(model, ids, 30, temperature=0, stop_token=stop, draft=NGram()), expected)
    tokens = generate(model, ids, 10**3, seed=0, draft=NGram())
    assert [next(tokens).shape for _ in range(7)] == [(2,)] * 7


@pytest.mark.parametrize("own", [True, False], ids=["the model itself", "n-grams"])
def test_texts_end_where_the_last_sequence_has_its_stop_token(make_model: Make, ids: Tensor, own: bool) -> None:
    """Every token of the free texts is tried, so that sequences end in different rounds, and in the first token."""
    model, prompt = make_model(), torch.cat([ids, ids.flip(1)])[:3]
    draft = model if own else NGram(2)
    for stop in text(model, prompt, 12, temperature=0).unique().tolist():
        expected = text(model, prompt, 12, temperature=0, stop_token=stop)
        assert torch.equal(text(model, prompt, 12, temperature=0, stop_token=stop, draft=draft), expected)


def rounds(model: LanguageModel, draft: LanguageModel | NGram, ids: Tensor, temperature: float) -> SpeculativeTexts:
    sampling = Sampling(temperature, 3, 0.7, None) if temperature else Sampling(0.0, None, None, None)
    return SpeculativeTexts(model, draft, ids, ids.shape[1] + 12, 3, sampling, stop_token=4, cuda_graph=None)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_reads_no_values(make_model: Make, ids: Tensor, temperature: float) -> None:
    """Tensors without values raise where a call would wait for a GPU, which no capture allows."""
    for model in models(make_model):
        model = model.to("meta")
        for draft in (NGram(2), model):
            texts = rounds(model, draft, ids.to("meta"), temperature)
            texts.advance()
            assert texts.progress.shape == (3,)


@torch.no_grad()
def test_rounds_write_to_tensors_of_fixed_addresses(make_model: Make, ids: Tensor) -> None:
    """A round whose texts are complete leaves them and the states as they are, so that a graph can be captured."""

    def held(texts: SpeculativeTexts) -> list[Tensor]:
        states = tree_leaves((texts.state, getattr(texts.source, "state", ())))
        return [texts.text, texts.length, texts.finite, *(t for t in states if t is not None)]

    for model in models(make_model):
        for draft in (NGram(2), model):
            texts = rounds(model, draft, ids, 1.0)
            addresses = [t.data_ptr() for t in held(texts)]
            while texts.read()[0] < texts.total - 2 and texts.read()[0] < texts.read()[1]:
                texts.advance()
            assert [t.data_ptr() for t in held(texts)] == addresses
            texts.length.fill_(texts.total)
            before = [t.clone() for t in stepped_tensors((*texts.state, *getattr(texts.source, "state", ())))]
            before.append(texts.text[:, : texts.total].clone())
            texts.advance()
            after = [
                *stepped_tensors((*texts.state, *getattr(texts.source, "state", ()))),
                texts.text[:, : texts.total],
            ]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def naive(text: list[int], n: int, count: int) -> list[int]:
    """Continue the last of the longest matches of the end of a text, one token at a time."""
    for size in range(min(n, len(text)), 0, -1):
        ends = [e for e in range(len(text) - 1) if e + 1 >= size and text[e + 1 - size : e + 1] == text[-size:]]
        if ends:
            copy = list(text)
            for ahead in range(count):
                copy.append(copy[ends[-1] + 1 + ahead])
            return copy[len(text) :]
    return [text[-1]] * count


def test_n_grams_are_looked_up() -> None:
    draw = torch.Generator().manual_seed(0)
    for n, count, size in itertools.product((1, 2, 3), (1, 4), (1, 2, 5, 30)):
        rows = torch.randint(0, 3, (8, size + 5), generator=draw)
        length = torch.randint(1, size + 1, (8,), generator=draw)
        found, q = Lookup(NGram(n), count).propose(rows, length)
        assert q is None
        for row, end, proposed in zip(rows.tolist(), length.tolist(), found.tolist(), strict=True):
            assert proposed == naive(row[:end], n, count)


def test_logits_that_are_not_finite(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^logits: got NaN or infinity"):
        text(model, ids, draft=NGram())


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"draft": "model"}, TypeError, ("draft:", "str", "NGram")),
        ({"draft": NGram(), "draft_tokens": 0}, ValueError, ("draft_tokens:", "0")),
        ({"draft": NGram(), "draft_tokens": 32}, ValueError, ("draft_tokens:", "32", "31")),
        ({"draft": NGram(), "cuda_graph": True}, ValueError, ("cuda_graph:", "cpu")),
    ],
    ids=str,
)
def test_wrong_arguments(
    make_model: Make, ids: Tensor, change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        generate(make_model(), ids, 3, **change)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_draft_of_another_vocabulary_and_caches_without_room(make_model: Make, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^draft: got a vocabulary of 7 tokens, expected the model's, 23"):
        generate(make_model(), ids, 3, draft=make_model(vocab_size=7))
    with pytest.raises(ValueError, match=r"^n: got 0"):
        NGram(0)
    model = make_model("attention")
    with pytest.raises(ValueError, match=r"^state: got a cache without room"):
        model.steps(ids[:, :3], model.initial_state(2))
    with pytest.raises(ValueError, match=r"^ids: got T = 33, expected from 1 to 32"):
        model.steps(ids[:1, :11].repeat(1, 3), model.initial_state(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixer", [*EVERY, "hybrid"])
def test_cuda_graphs_of_verification(make_model: Make, ids: Tensor, mixer: str) -> None:
    fields = HYBRID if mixer == "hybrid" else {"mixer": mixer}
    model = make_model(dtype=torch.float32, d_model=64, **fields).cuda()
    prompt = ids.cuda()
    expected = text(model, prompt, 40, temperature=0, cuda_graph=False)
    for draft in (NGram(2), model):
        for graph in (True, False):
            found = text(model, prompt, 40, temperature=0, draft=draft, cuda_graph=graph)
            assert (found == expected).float().mean() > 0.9  # a near tie may end otherwise


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("mixer", "batch"), [("mlstm_exp", 1), ("mlstm_exp", 3), ("hybrid", 3)])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_graphs_draw_the_tokens_of_calls_without_them(
    make_model: Make, ids: Tensor, mixer: str, options: dict[str, Any], batch: int
) -> None:
    """The second text of a generator goes on with its numbers, and so does torch's global generator."""
    fields = HYBRID if mixer == "hybrid" else {"mixer": mixer}
    model = make_model(dtype=torch.float32, d_model=64, **fields).cuda()
    small = make_model("mlstm_sig", dtype=torch.float32, seed=1).cuda()
    prompt = torch.cat([ids, ids.flip(1)])[:batch].cuda()
    for draft in (NGram(2), small, model):
        found = []
        for graph in (True, False):
            given: dict[str, Any] = {"draft": draft, "cuda_graph": graph, **options}
            generator = torch.Generator("cuda").manual_seed(3)
            torch.manual_seed(5)
            texts = [text(model, prompt, 20, seed=7, **given)]
            texts += [text(model, prompt, 20, generator=generator, **given) for _ in range(2)]
            texts += [text(model, prompt, 20, **given) for _ in range(2)]
            found.append(
                (torch.cat(texts), torch.rand(4, device="cuda", generator=generator), torch.rand(4, device="cuda"))
            )
        for with_graph, without in zip(*found, strict=True):
            assert torch.equal(with_graph, without)
        if options != {"temperature": 0}:
            assert not torch.equal(*found[0][0][batch : 3 * batch].chunk(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_end_texts_at_stop_tokens(make_model: Make, ids: Tensor) -> None:
    model, prompt = make_model(dtype=torch.float32, d_model=64).cuda(), ids.cuda()
    for stop in text(model, prompt, 12, temperature=0).unique().tolist():
        options: dict[str, Any] = {"temperature": 0, "stop_token": stop, "draft": NGram(2)}
        expected = text(model, prompt, 12, cuda_graph=False, **options)
        assert torch.equal(text(model, prompt, 12, cuda_graph=True, **options), expected)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    rates = runpy.run_path(str(EXAMPLE))["main"](["--tokens", "5", "--device", "cpu"])
    assert set(rates) == {"none", "n-gram of 3", "another model", "the model itself"}
    assert capsys.readouterr().out.count("100% of the tokens as without one") == 4
