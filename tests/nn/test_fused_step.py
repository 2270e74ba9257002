"""The fused step of one sequence equals the model's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla.backends.gpu.runtime import INTERPRETED
from tfla.nn import LanguageModel
from tfla.nn.fused_step import FusedStep, unsupported

Make = Callable[..., LanguageModel]
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = {"d_model": 16, "num_blocks": 1}  # in the interpreter every row of a matrix takes milliseconds
CASES: dict[str, dict[str, Any]] = {
    "exp": {"mixer": "mlstm_exp", **SMALL},
    "sig, RMSNorm": {"mixer": "mlstm_sig", "head_norm": "rms", **SMALL},
    "odd sizes": {"mixer": "mlstm_exp", **SMALL, "d_model": 18, "num_heads": 3},
}

runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"
)


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
@torch.no_grad()
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_steps_are_those_of_the_model(make_model: Make, close: Callable, ids: Tensor, case: dict[str, Any]) -> None:
    model = make_model(dtype=torch.float32, **case).to(DEVICE)
    tokens = ids[:1, :2].to(DEVICE)
    state = model.initial_state(1)
    assert unsupported(model, state) is None
    step, found = FusedStep(model), []
    for token in tokens.T:
        logits, state = step(token, state)
        found.append(logits.clone())
    close(torch.stack(found, 1), model(tokens))


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
def test_unsupported_models_keep_their_own_step(make_model: Make) -> None:
    def why(model: LanguageModel, batch: int = 1) -> str | None:
        return unsupported(model, model.initial_state(batch))

    def make(mixer: str = "mlstm_exp", **fields: Any) -> LanguageModel:
        return make_model(mixer, dtype=torch.float32, **fields).to(DEVICE)

    assert why(make(), batch=2) == "it is for one sequence and mLSTMs"
    assert why(make("attention")) == "it is for one sequence and mLSTMs"
    assert why(make().double()) == "it takes no weights of torch.float64"
    watched = make()
    watched.blocks[1].mixer.input_gate.register_forward_hook(lambda *_: None)
    assert why(watched) == "blocks.1.mixer.input_gate has hooks"
    changed = make()
    changed.blocks[0].ffn.up_proj = torch.nn.Linear(32, 88, bias=False, device=DEVICE)
    assert why(changed) == "blocks.0.ffn.up_proj is a Linear"
    with torch.autocast(DEVICE, torch.bfloat16):
        assert why(make()) == "it does not support autocast"
    mixed = make()
    mixed.norm.bfloat16()
    assert why(mixed) == "norm.weight is not contiguous, or unlike the embedding"


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a machine on which it cannot run")
def test_without_a_gpu(make_model: Make) -> None:
    model = make_model()
    assert unsupported(model, model.initial_state(1)) == "it needs Triton and an NVIDIA GPU"
