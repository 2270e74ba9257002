"""generate: sampling, its arguments and logits that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tfla.nn import LanguageModel, generate, sampling
from tfla.nn.config import Mixer
from tfla.nn.generate import FiniteCheck, sample_tokens

Make = Callable[..., LanguageModel]


def text(model: LanguageModel, ids: Tensor, n: int = 9, **options: Any) -> Tensor:
    return torch.stack(list(generate(model, ids, n, **options)), 1)


def test_greedy_is_the_argmax_of_whole_forwards(mixer: str, make_model: Make, ids: Tensor) -> None:
    model = make_model(mixer)
    sequence = ids
    for _ in range(9):
        sequence = torch.cat([sequence, model(sequence)[:, -1].argmax(-1)[:, None]], 1)
    greedy = text(model, ids, temperature=0)
    assert torch.equal(greedy, sequence[:, 19:])
    assert torch.equal(text(model, ids, top_k=1), greedy)
    assert torch.equal(text(model, ids, top_p=1e-9), greedy)


def test_a_prompt_in_parts_gives_the_same_text(
    mixer: str, make_model: Make, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(mixer)
    whole = text(model, ids, temperature=0)
    monkeypatch.setattr(sampling, "PREFILL", 4)
    assert torch.equal(text(model, ids, temperature=0), whole)


def test_same_seed_same_text(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    one = text(model, ids, seed=3)
    torch.manual_seed(99)
    assert torch.equal(text(model, ids, seed=3), one)
    assert torch.equal(text(model, ids, generator=torch.Generator().manual_seed(3)), one)
    assert not torch.equal(text(model, ids, seed=4), one)
    assert one.dtype == torch.int64
    assert one.shape == (2, 9)


def test_it_streams_without_gradients(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    tokens = generate(model, ids, 10**9, seed=0)
    assert [next(tokens).shape for _ in range(3)] == [(2,)] * 3
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_stop_token(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    free = text(model, ids, 40, seed=0)
    stop = int(free[0, 2])
    tokens = text(model, ids, 40, seed=0, stop_token=stop)
    ends = [row.tolist().index(stop) if stop in row else 39 for row in free]
    assert tokens.shape[1] == max(ends) + 1
    for row, (end, kept) in enumerate(zip(ends, tokens, strict=True)):
        assert torch.equal(kept[: end + 1], free[row, : end + 1])
        assert (kept[end + 1 :] == stop).all()


def test_sampling_follows_the_probabilities() -> None:
    p = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = p.log().expand(20_000, -1)
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({}, p),
        ({"temperature": 0.5}, p**2),
        ({"top_k": 2}, p * (p >= 0.25)),
        ({"top_k": 99}, p),
        ({"top_p": 0.6}, p * (p >= 0.25)),  # 0.4 alone does not reach 0.6
        ({"top_p": 1.0}, p),
        ({"top_k": 3, "top_p": 0.75}, p * (p >= 0.25)),  # of three that sum to 0.85, two have 0.76
    ]
    for options, expected in cases:
        tokens = sample_tokens(logits, generator=torch.Generator().manual_seed(0), **options)
        found = tokens.bincount(minlength=5) / len(tokens)
        torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.02)
        assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (TypeError, "ids", {"ids": torch.zeros(2, 3)}),
        (ValueError, "ids", {"ids": torch.zeros(3, dtype=torch.int64)}),
        (ValueError, "ids", {"ids": torch.zeros(2, 0, dtype=torch.int64)}),
        (ValueError, "max_new_tokens", {"max_new_tokens": 0}),
        (TypeError, "max_new_tokens", {"max_new_tokens": 2.0}),
        (ValueError, "temperature", {"temperature": -0.1}),
        (ValueError, "temperature", {"temperature": float("nan")}),
        (ValueError, "top_k", {"top_k": 0}),
        (TypeError, "top_k", {"top_k": 1.5}),
        (ValueError, "top_p", {"top_p": 0.0}),
        (ValueError, "top_p", {"top_p": 1.1}),
        (ValueError, "seed", {"seed": 1, "generator": torch.Generator()}),
        (ValueError, "stop_token", {"stop_token": 23}),
        (ValueError, "draft_tokens", {"draft_tokens": 0}),
        (TypeError, "draft_tokens", {"draft_tokens": "4"}),
    ],
)
def test_wrong_arguments_are_named_at_the_call(
    make_model: Make, ids: Tensor, kind: type[Exception], name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=rf"^{name}: got .*expected "):
        generate(make_model(), **{"ids": ids, "max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (TypeError, "model", {"model": {"d_model": 8}}),
        (ValueError, "ids", {"ids": torch.full((1, 3), 23)}),
        (ValueError, "ids", {"ids": torch.tensor([[0, -1]])}),
        (ValueError, "ids", {"ids": torch.zeros(1, 3, dtype=torch.int64, device="meta")}),
        (TypeError, "temperature", {"temperature": "1"}),
        (TypeError, "temperature", {"temperature": None}),
        (TypeError, "temperature", {"temperature": [1.0]}),
        (TypeError, "temperature", {"temperature": torch.ones(2)}),
        (TypeError, "top_k", {"top_k": "3"}),
        (TypeError, "top_p", {"top_p": "0.5"}),
        (TypeError, "top_p", {"top_p": True}),
        (ValueError, "top_p", {"top_p": float("nan")}),
        (TypeError, "seed", {"seed": 1.5}),
        (TypeError, "seed", {"seed": "1"}),
        (ValueError, "seed", {"seed": 2**64}),
        (TypeError, "generator", {"generator": 3}),
        (TypeError, "stop_token", {"stop_token": 1.0}),
        (TypeError, "cuda_graph", {"cuda_graph": "yes"}),
        (ValueError, "cuda_graph", {"cuda_graph": True}),
    ],
)
def test_arguments_of_wrong_types_are_named_at_the_call(
    make_model: Make, ids: Tensor, kind: type[Exception], name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=rf"^{name}: got .*expected "):
        generate(**{"model": make_model(), "ids": ids, "max_new_tokens": 3} | options)


def test_numbers_of_other_types_are_accepted(make_model: Make, ids: Tensor) -> None:
    model = make_model()
    plain = text(model, ids, seed=0, temperature=0.5, top_p=0.5)
    assert torch.equal(text(model, ids, seed=0, temperature=torch.tensor(0.5), top_p=torch.tensor(0.5)), plain)
    assert torch.equal(text(model, ids, seed=0, temperature=1, top_p=1), text(model, ids, seed=0))


@pytest.mark.parametrize("temperature", [1e-3, 1e-37, 1e-300, 5e-324])
def test_every_temperature_above_zero_samples(make_model: Make, ids: Tensor, temperature: float) -> None:
    model = make_model(dtype=torch.float32)
    assert torch.equal(text(model, ids, seed=0, temperature=temperature), text(model, ids, temperature=0))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 0}, {"seed": 0, "top_k": 3, "top_p": 0.5}])
def test_weights_that_are_not_finite_give_no_token(make_model: Make, ids: Tensor, options: dict[str, Any]) -> None:
    model = make_model()
    with torch.no_grad():
        model.embedding.weight[int(ids[1, 4])] = torch.nan
    received = []
    with pytest.raises(ValueError, match=r"^logits: got NaN or infinity, expected finite numbers"):
        received.extend(generate(model, ids, 5, **options))
    assert received == []


@pytest.mark.parametrize(
    ("mixer", "fields"),
    [
        *((mixer, {}) for mixer in get_args(Mixer)),
        ("attention", {"window": 3, "num_kv_heads": 1, "attention_sinks": True}),
    ],
)
def test_nan_in_any_weight_gives_no_token(make_model: Make, mixer: str, fields: dict[str, Any]) -> None:
    """A prompt of a few tokens is attended to by scores that fit a CPU's registers, as one of many is not."""
    names = [name for name, _ in make_model(mixer, num_blocks=1, **fields).named_parameters()]
    for name in names:
        model = make_model(mixer, torch.float32, num_blocks=1, **fields)
        with torch.no_grad():
            model.get_parameter(name).fill_(torch.nan)
        for length in (1, 4, 20):
            with pytest.raises(ValueError, match=r"^logits: got NaN or infinity, expected finite numbers"):
                list(generate(model, torch.zeros(1, length, dtype=torch.int64), 2))


@pytest.mark.parametrize("stops", [False, True])
def test_a_later_token_from_logits_that_are_not_finite_is_not_yielded(
    make_model: Make, ids: Tensor, stops: bool
) -> None:
    """The third token of one of two sequences has logits that are not finite; a stopped sequence does not matter."""
    model, steps = make_model(), 0
    greedy = text(model, ids, 2, temperature=0)
    stop = min(set(range(23)) - set(greedy.flatten().tolist())) if stops else None
    step = model.step

    def breaks(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        logits, state = step(*args, **options)
        return (torch.where(torch.arange(2)[:, None] == 1, torch.nan, logits) if steps == 2 else logits), state

    model.step = breaks  # type: ignore[method-assign]
    received = []
    with pytest.raises(ValueError, match=r"^logits: got NaN"):
        received.extend(generate(model, ids, 9, temperature=0, stop_token=stop))
    assert len(received) == 2
    steps = 0
    assert len(list(generate(model, ids, 3, temperature=0, stop_token=int(greedy[1, 0])))) == 3


def test_the_finite_check_does_not_wait_for_a_gpu() -> None:
    """On a GPU the host reads its own copy where it must not wait, and the device's flag where it may."""
    finite_check = FiniteCheck(torch.device("cpu"))
    finite_check.host_flag = torch.zeros((), dtype=torch.bool)  # as pinned memory that nothing was copied to yet
    finite_check.record(torch.tensor([True, False]))
    finite_check.check(wait=False)
    with pytest.raises(ValueError, match=r"^logits: got NaN"):
        finite_check.check(wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 0}, {"seed": 0, "stop_token": 22}])
def test_weights_that_are_not_finite_give_no_token_on_a_gpu(make_model: Make, ids: Tensor, options: dict) -> None:
    model = make_model(dtype=torch.float32).cuda()
    with torch.no_grad():
        model.unembedding.weight[3] = torch.nan
    received = []
    with pytest.raises(ValueError, match=r"^logits: got NaN"):
        received.extend(generate(model, ids.cuda(), 5, **options))
    assert received == []
