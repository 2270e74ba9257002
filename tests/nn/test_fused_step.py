"""The fused step of a few sequences equals the model's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tfla.backends.gpu.runtime import INTERPRETED
from tfla.nn import LanguageModel, fused_step
from tfla.nn.fused_step import FusedStep, unsupported

Make = Callable[..., LanguageModel]
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = {"d_model": 16, "num_blocks": 1}  # in the interpreter every row of a matrix takes milliseconds
CASES: dict[str, dict[str, Any]] = {
    "exp": {"mixer": "mlstm_exp", **SMALL},
    "sig, RMSNorm": {"mixer": "mlstm_sig", "head_norm": "rms", **SMALL},
    "odd sizes": {"mixer": "mlstm_exp", **SMALL, "d_model": 18, "num_heads": 3},
    "several tiles": {"mixer": "mlstm_exp", **SMALL, "d_model": 80, "vocab_size": 70},
}

runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"
)


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
@torch.no_grad()
@pytest.mark.parametrize(("case", "batch"), [*((case, batch) for case in CASES for batch in (1, 5)), ("exp", 16)])
def test_steps_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, make_model: Make, close: Callable, case: str, batch: int
) -> None:
    """Kernels for several sequences run through the columns in blocks, here of 16."""
    tiles = {name: replace(tile, rows=16, columns=32) for name, tile in fused_step.TILES.items()}
    monkeypatch.setattr(fused_step, "TILES", tiles)
    model = make_model(dtype=torch.float32, **CASES[case]).to(DEVICE)
    tokens = torch.arange(2 * batch, device=DEVICE).view(batch, 2) % 23
    state = model.initial_state(batch)
    assert unsupported(model, state) is None
    step, found = FusedStep(model, batch), []
    for token in tokens.T:
        logits, state = step(token, state)
        found.append(logits.clone())
    close(torch.stack(found, 1), model(tokens))


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
@torch.no_grad()
@pytest.mark.parametrize("rows", [(2,), (3, -1, 0)])
def test_states_are_rows_of_a_pool(make_model: Make, close: Callable, rows: tuple[int, ...]) -> None:
    model = make_model(dtype=torch.float32, **SMALL).to(DEVICE)
    tokens = torch.arange(8, device=DEVICE).view(4, 2)
    _, pool = model(tokens, return_state=True)
    expected = tuple(each.clone() for each in pool)
    indices, ids = torch.tensor(rows, device=DEVICE), torch.arange(len(rows), device=DEVICE)
    assert unsupported(model, pool, len(rows)) is None
    logits, after = FusedStep(model, len(rows))(ids, pool, indices)
    reference, _ = model.step(ids, expected, state_indices=indices)
    held = indices >= 0
    close(logits[held], reference[held])
    for part, now, other in zip(pool, after, expected, strict=True):
        assert part is now or part.C.data_ptr() == now.C.data_ptr()
        for a, b in zip(now, other, strict=True):
            close(a, b)


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
def test_unsupported_models_keep_their_own_step(make_model: Make) -> None:
    def why(model: LanguageModel, batch: int = 1) -> str | None:
        return unsupported(model, model.initial_state(batch))

    def make(mixer: str = "mlstm_exp", **fields: Any) -> LanguageModel:
        return make_model(mixer, dtype=torch.float32, **fields).to(DEVICE)

    assert why(make(), batch=16) is None
    assert why(make(), batch=17) == "it is for mLSTMs and up to 16 sequences"
    assert why(make("attention")) == "it is for mLSTMs and up to 16 sequences"
    assert unsupported(make(), make().initial_state(99), 3) is None
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
