"""The optimizer, the gradients and the learning rates of the paper's recipe."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import Optim
from tfla.train.reading import Reading
from tfla.train.recipe import Schedule, clipped_gradients, optimizer


def test_linear_weights_decay_and_nothing_else():
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=7))
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, other = optimizer(model, Optim()).param_groups
    decaying_names, other_names = ({names[id(p)] for p in group["params"]} for group in (decaying, other))
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert {"unembedding.weight", "blocks.0.mixer.q_proj.weight", "blocks.0.ffn.down_proj.weight"} <= decaying_names
    assert {"embedding.weight", "norm.weight", "blocks.0.mixer_norm.weight"} <= other_names
    assert {n for n in names.values() if n.endswith("bias") or "norm" in n} <= other_names
    assert decaying_names | other_names == set(names.values())


def test_frozen_weights_are_not_updated():
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=7, input_gate_trainable=False))
    given = sum(len(group["params"]) for group in optimizer(model, Optim()).param_groups)
    assert given == sum(p.requires_grad for p in model.parameters()) < len(list(model.parameters()))


def test_adamw_has_the_options_of_the_paper():
    group = optimizer(torch.nn.Linear(2, 2), Optim()).param_groups[0]
    assert (group["betas"], group["eps"], group["lr"]) == ((0.9, 0.95), 1e-8, 3e-3)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_of_the_mean_loss_with_the_norm_clipped(micro_batches):
    model = torch.nn.Linear(4, 5)
    model.weight.grad = torch.ones_like(model.weight)  # of the step before
    x = torch.randn(6, 4)
    expected = torch.autograd.grad(model(x).square().mean(), [model.weight, model.bias])
    norm = torch.cat([g.flatten() for g in expected]).norm().item()
    found = clipped_gradients(model, lambda x: model(x).square(), x.chunk(micro_batches), norm / 2).reading().read()
    assert found == pytest.approx((model(x).square().mean().item(), norm), rel=1e-5)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g / 2, rtol=1e-4, atol=1e-6)


def test_schedule_of_the_paper():
    lr = Schedule(Optim(lr=1e-3), 36_000)
    assert lr(0) == pytest.approx(1e-3 / 750)
    assert lr(374) == pytest.approx(0.5e-3)
    assert lr(749) == lr(750) == pytest.approx(1e-3)
    assert lr((750 + 35_000) // 2) == pytest.approx(0.55e-3)
    assert lr(35_000) == pytest.approx(1e-4)
    assert lr(35_500) == pytest.approx(0.5e-4)
    assert lr(35_999) == pytest.approx(1e-7)
    rates = [lr(step) for step in range(36_000)]
    assert rates[:750] == sorted(rates[:750])
    assert rates[750:] == sorted(rates[750:], reverse=True)


def test_short_runs_scale_the_schedule():
    short = Schedule(Optim(), 200)
    assert (short.warmup, short.cooldown) == (20, 20)
    given = Schedule(Optim(warmup_steps=0, cooldown_steps=3), 5)
    assert given(0) == pytest.approx(3e-3)
    assert Schedule(Optim(warmup_steps=3, cooldown_steps=2), 5)(2) == pytest.approx(3e-3)
    assert all(Schedule(Optim(), n)(step) > 0 for n in (1, 2, 9, 11) for step in range(n))
    with pytest.raises(UserError, match=r"optim\.warmup_steps, optim\.cooldown_steps: got 4 and 2"):
        Schedule(Optim(warmup_steps=4, cooldown_steps=2), 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_reading_does_not_wait_for_what_is_enqueued_after_it():
    reading, later = Reading([torch.full((), 3.0, device="cuda")]), torch.cuda.Event()
    torch.cuda._sleep(2**31)  # about a second
    later.record()
    assert reading.read() == [3.0]
    assert not later.query()


def test_a_reading_waits_for_the_device_of_its_numbers(monkeypatch):
    """The current device of a run on cuda:1 is cuda:0, whose streams do not wait for the copies."""
    recorded = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    number = Mock(is_cuda=True, device=torch.device("cuda:1"))
    number.detach.return_value = number
    monkeypatch.setattr(Reading, "_start", lambda self, value: torch.tensor(3.0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    assert Reading([number]).read() == [3.0]
    assert recorded == [torch.device("cuda:1")]
