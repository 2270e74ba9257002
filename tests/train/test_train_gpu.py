"""Training on a GPU: bfloat16 by default, and a run that continues."""

from __future__ import annotations

import math

import pytest
import torch

from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import Optim
from tfla.train.evaluation import token_losses
from tfla.train.logging import Metrics, read_metrics
from tfla.train.loop import train
from tfla.train.recipe import clipped_gradients, optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("reset", ["gate", "cu_seqlens"])
def test_it_learns_on_a_gpu_and_continues(tiny, monkeypatch, reset):
    config = tiny(
        device="auto", reset=reset, accumulate=2, steps=60, eval_every=30, checkpoint_every=20,
        optim=Optim(lr=1e-2, warmup_steps=2, cooldown_steps=2),
    )  # fmt: skip
    write = Metrics.write

    def break_off(self, kind, step, **values):
        if (kind, step) == ("train", 45):
            raise SystemExit
        write(self, kind, step, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", break_off)
        with pytest.raises(SystemExit):
            train(config)
    trained = train(config)
    assert trained.model.embedding.weight.device.type == "cuda"
    assert trained.model.embedding.weight.dtype == torch.float32
    records = read_metrics(config.run)
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert len(losses) == 60
    assert all(math.isfinite(x) for x in losses)
    bits = [r["bits_per_byte"] for r in records if r["kind"] == "eval"]
    assert bits[-1] < 0.6 * bits[0]


@pytest.mark.parametrize("reset", ["gate", "cu_seqlens"])
def test_the_host_enqueues_an_update_without_waiting_for_the_gpu(reset):
    """Otherwise it would have no lead over the GPU, however late it reads the loss."""
    config = ModelConfig(d_model=128, num_blocks=1, num_heads=2, vocab_size=257)
    model = LanguageModel(config).cuda()
    adamw, windows = optimizer(model, Optim()), torch.randint(256, (4, 129))

    def losses(rows):
        with torch.autocast("cuda", torch.bfloat16):
            return token_losses(model, rows, 256, reset, device="cuda")

    def update():
        reading = clipped_gradients(model, losses, windows.chunk(2), 1.0).reading()
        adamw.step()
        return reading

    first = update().read()  # compiles the kernels and makes the optimizer's state
    torch.cuda.synchronize()
    torch.cuda._sleep(2**31)  # about a second
    reading = update()
    assert not reading.arrived()
    loss, norm = reading.read()
    assert reading.arrived()
    assert loss < first[0]
    assert norm > 0
