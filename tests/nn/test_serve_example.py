"""The example of a server that adds and removes requests between steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tfla.nn import generate

SCRIPT = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("serve_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_request_is_answered_as_if_alone(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    done = serve.main(["--slots", "3", "--requests", "7", "--device", "cpu"])
    assert sorted(request.name for request in done) == [f"request {n}" for n in range(7)]
    model = serve.load(None, "cpu")
    for request in done:
        alone = list(generate(model, request.prompt[None], request.max_new_tokens, temperature=0))
        assert request.tokens == torch.cat(alone).tolist()
    assert "7 requests, " in capsys.readouterr().out


def test_a_hybrid_is_served(serve: ModuleType) -> None:
    """Caches of attention are rows of the pool, and prompts that start alike share the caches of their prefix."""
    layers = ("gated_delta_net", "attention")
    done = serve.main(["--slots", "3", "--requests", "7", "--device", "cpu", "--capacity", "80", "--layers", *layers])
    model = serve.load(None, "cpu", layers)
    server = serve.Server(model, slots=2, part=8, capacity=40)
    for n in range(3):
        server.submit(serve.Request(f"prefix {n}", torch.cat([torch.arange(20), torch.tensor([100 + n, 7])]), 6))
    while server.busy:
        done += server.step()
    assert server.shared == 2 * 16
    for request in done:
        alone = list(generate(model, request.prompt[None], request.max_new_tokens, temperature=0))
        assert request.tokens == torch.cat(alone).tolist()
    with pytest.raises(ValueError, match="big: got 41 tokens, expected at most 40, the capacity"):
        server.submit(serve.Request("big", torch.arange(20), 21))


@pytest.mark.parametrize("layers", [("mlstm_exp", "kda"), ("mamba2", "attention")], ids=str)
def test_proposed_tokens_change_no_answer(
    serve: ModuleType, layers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of different lengths come and go while others accept some of their proposals."""
    model = serve.load(None, "cpu", layers).double()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (length,), generator=generator) for length in (3, 20, 1, 12, 30)]
    alone = [torch.cat(list(generate(model, prompt[None], 30, temperature=0))).tolist() for prompt in prompts]
    texts = [prompt.tolist() + answer for prompt, answer in zip(prompts, alone, strict=True)]

    def propose(text: list[int], count: int) -> list[int]:
        """Return what the model will say, with one wrong token at a place that depends on the length of the text."""
        (whole,) = (each for each in texts if each[: len(text)] == text)
        said = (whole[len(text) :] + [0] * count)[:count]
        wrong = len(text) % (count + 1)
        return [token + 1 if n == wrong else token for n, token in enumerate(said)]

    for proposals in (serve.propose, propose):
        monkeypatch.setattr(serve, "propose", proposals)
        server, done = serve.Server(model, slots=3, part=8, capacity=60, draft_tokens=4), []
        for n, prompt in enumerate(prompts):
            server.submit(serve.Request(str(n), prompt, 30 - 5 * n))
        while server.busy:
            done += server.step()
        found = {int(request.name): request.tokens for request in done}
        assert found == {n: alone[n][: 30 - 5 * n] for n in range(5)}
    assert 0.2 * server.proposed < server.accepted < 0.8 * server.proposed


def test_proposals_are_what_followed_the_latest_tokens_before(serve: ModuleType) -> None:
    assert serve.propose([1, 2, 3, 9, 1, 2, 3], 6) == [9, 1, 2, 3, 9, 1]
    assert serve.propose([2, 7, 1, 2, 8, 5, 2], 2) == [8, 5]
    assert serve.propose([5, 6], 2) == [6, 6]
    assert serve.propose([4], 1) == [4]


def test_a_stop_token_frees_the_slot(serve: ModuleType) -> None:
    model = serve.load(None, "cpu")
    prompt = torch.arange(9)
    stop = int(list(generate(model, prompt[None], 3, temperature=0))[2])
    server = serve.Server(model, 1, stop_token=stop)
    for name in ("first", "second"):
        server.submit(serve.Request(name, prompt, 100))
    done = [request for _ in range(10) if server.busy for request in server.step()]
    assert [request.name for request in done] == ["first", "second"]
    assert all(request.tokens[-1] == stop and len(request.tokens) <= 3 for request in done)


def test_a_saved_model_is_served(serve: ModuleType, tmp_path: Path) -> None:
    model = serve.load(None, "cpu")
    model.save_pretrained(tmp_path)
    assert torch.equal(serve.load(str(tmp_path), "cpu").embedding.weight, model.embedding.weight)


def test_prompts_share_the_states_of_their_prefixes(serve: ModuleType) -> None:
    """Of prompts with 20 tokens in common the later ones read what comes after the 16th; the oldest state goes."""
    model = serve.load(None, "cpu")
    common = torch.arange(20)
    prompts = [torch.cat([common, torch.tensor([100 + n, 7])]) for n in range(3)]
    server, done = serve.Server(model, slots=1, part=8, prefixes=2), []
    for n, prompt in enumerate(prompts):
        server.submit(serve.Request(f"request {n}", prompt, 5))
    while server.busy:
        done += server.step()
    assert server.shared == 2 * 16
    assert len(server.states) == 2
    for request in done:
        alone = list(generate(model, request.prompt[None], 5, temperature=0))
        assert request.tokens == torch.cat(alone).tolist()
