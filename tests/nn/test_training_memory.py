"""The memory that a block saves for its backward, and the exactness of recomputation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.block import Block

D_MODEL, BATCH, TIME = 128, 2, 512


def block(mixer: str) -> Block:
    torch.manual_seed(0)
    return Block(ModelConfig(d_model=D_MODEL, num_blocks=1, num_heads=2, mixer=mixer, vocab_size=64))  # type: ignore[arg-type]


def held_bytes(function: Callable[[], Tensor]) -> float:
    """Return the bytes that a CPU call leaves allocated, per token and channel: its result and what autograd keeps."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = function()
    held = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    del result
    return held / (BATCH * TIME * D_MODEL)


def bytes_of_block(mixer: str) -> float:
    x, module = torch.randn(BATCH, TIME, D_MODEL, requires_grad=True), block(mixer)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)[0]

    forward()
    return held_bytes(forward)


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
def test_an_mlstm_block_keeps_what_an_attention_block_keeps(mixer: str) -> None:
    # Both keep q, k, v and h. The mLSTM has half the channels in q and k, an output gate more, states and denominators.
    assert bytes_of_block(mixer) <= 1.1 * bytes_of_block("attention")


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig", "attention"])
@pytest.mark.parametrize("autocast", [False, True])
def test_recomputing_changes_no_digit(mixer: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 64, D_MODEL)

    def gradients() -> list[Tensor]:
        module = block(mixer)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x)[0].float().square().mean().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    recomputed = gradients()
    for name in ("model", "layers", "block", "mixers.norms"):
        monkeypatch.setattr(f"tfla.nn.{name}.recomputed", lambda function, *inputs: function(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(recomputed, gradients(), strict=True))


def test_torch_func_takes_gradients_of_a_block() -> None:
    module, x = block("mlstm_exp"), torch.randn(1, 32, D_MODEL)
    weights = dict(module.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (x,))[0].square().mean()

    found = torch.func.grad(loss)(weights)
    loss(weights).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_losses_by_parts_keep_no_logits() -> None:
    config = ModelConfig(d_model=D_MODEL, num_blocks=1, num_heads=2, vocab_size=8192)
    model, ids = LanguageModel(config), torch.zeros(BATCH, TIME, dtype=torch.int64)
    ids[0, 0] = 1  # the operator is imported before the measurement
    model.losses(ids, ids)
    kept = held_bytes(lambda: model.losses(ids, ids, tokens_per_pass=128))
    assert kept < held_bytes(lambda: model.hidden(ids)[0]) + 32
    logits = 4 * config.vocab_size / D_MODEL  # of one token in float32, for each channel
    assert held_bytes(lambda: torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())) > logits
