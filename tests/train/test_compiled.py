"""A model whose blocks are compiled with one graph."""

import pytest
import torch
import torch._dynamo.testing

from tfla.nn import LanguageModel, ModelConfig
from tfla.train.evaluation import token_losses
from tfla.train.input_gates import InputGateMonitor
from tfla.train.layout import compiled


@pytest.mark.parametrize("mixer", ["mlstm_exp", "attention"])
@pytest.mark.parametrize("reset", ["gate", "cu_seqlens"])
def test_losses_and_gradients_are_the_same_with_one_graph_for_all_blocks(mixer, reset):
    torch.compiler.reset()
    windows = torch.randint(0, 20, (2, 33))
    windows[0, 7] = windows[1, 15] = 19
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=4, num_heads=2, mixer=mixer, vocab_size=20))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = []
    for how in (lambda m: m, lambda m: compiled(m, counter)):
        losses = token_losses(how(model), windows, 19, reset)
        found.append([losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert counter.frame_count == 2  # a block and the losses
    with torch.no_grad():
        torch.testing.assert_close(token_losses(compiled(model, counter), windows, 19, reset), found[0][0].detach())


def test_monitoring_the_gates_takes_one_graph_more():
    torch.compiler.reset()
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=4, num_heads=2, vocab_size=20))
    monitor, counter = InputGateMonitor(model), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled(model, counter)(torch.randint(0, 20, (2, 9)))
    assert counter.frame_count == 3  # in the first block, the monitor has no value yet
    assert monitor.take().item() == pytest.approx(15 * torch.tensor(-10 / 15).tanh().item(), rel=1e-5)
