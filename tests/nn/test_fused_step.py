"""The fused step of a few sequences equals the model's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tfla.backends.gpu.runtime import INTERPRETED
from tfla.nn import LanguageModel, fused_step
from tfla.nn.decode import copy_state
from tfla.nn.fused_step import FusedStep, unsupported
from tfla.nn.step_tiles import choose_tiles

Make = Callable[..., LanguageModel]
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = {"d_model": 16, "num_blocks": 1}  # in the interpreter every row of a matrix takes milliseconds
CASES: dict[str, dict[str, Any]] = {
    "exp": {"mixer": "mlstm_exp", **SMALL},
    "sig, RMSNorm": {"mixer": "mlstm_sig", "head_norm": "rms", **SMALL},
    "odd sizes": {"mixer": "mlstm_exp", **SMALL, "d_model": 18, "num_heads": 3},
    "several tiles": {"mixer": "mlstm_exp", **SMALL, "d_model": 80, "vocab_size": 70},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 16, "columns": 32, "splits": 1, "swapped": False},
    "swapped": {"rows": 32, "columns": 32, "splits": 1, "swapped": True},
    "splits": {"rows": 16, "columns": 32, "splits": 2, "swapped": False},
    "swapped splits": {"rows": 16, "columns": 32, "splits": 4, "swapped": True},
}

runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"
)


@runs
@pytest.mark.gpu
@pytest.mark.interpreter
@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "batch", "layout"),
    [
        *((case, 1, "rows") for case in CASES),
        *zip(CASES, (5,) * 4, LAYOUTS, strict=True),
        ("odd sizes", 5, "rows"),
        ("several tiles", 5, "splits"),
        ("exp", 16, "swapped splits"),
        ("exp", 17, "swapped"),
        ("exp", 33, "rows"),
    ],
)
def test_steps_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, make_model: Make, close: Callable, case: str, batch: int, layout: str
) -> None:
    """Kernels for several sequences run through the columns in blocks, here of 16."""
    height, tiles = choose_tiles(batch, 80, 4)
    small = {name: replace(tile, **LAYOUTS[layout]) for name, tile in tiles.items()}
    monkeypatch.setattr(fused_step, "choose_tiles", lambda *_: (height, small))
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
@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
def test_proposed_tokens_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, make_model: Make, close: Callable, mixer: str
) -> None:
    """The sequences accept different numbers of tokens, of two blocks whose inputs have to be kept until then."""
    height, tiles = choose_tiles(6, 80, 4)
    small = {name: replace(tile, **LAYOUTS["rows"]) for name, tile in tiles.items()}
    monkeypatch.setattr(fused_step, "choose_tiles", lambda *_: (height, small))
    model = make_model(mixer, dtype=torch.float32, d_model=16).to(DEVICE)
    prompt, ids = torch.arange(14, device=DEVICE).view(2, 7).split([4, 3], 1)
    state, lengths = model.read_prompt(prompt)[1], torch.tensor([1, 3], device=DEVICE)
    assert unsupported(model, state, ids.numel()) is None
    expected, accept = model.steps(ids, state)
    logits, accept_fused = FusedStep(model, ids.numel()).steps(ids, copy_state(state, None))
    close(logits, expected)
    for after, wanted in zip(accept_fused(lengths), accept(lengths), strict=True):
        for part, own in zip(after, wanted, strict=True):
            assert (part is None) == (own is None)
            if own is not None:
                close(part, own)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("batch", [2, 16, 20, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlapped", [False, True])
def test_products_of_tensor_cores_are_as_exact_as_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, make_model: Make, batch: int, dtype: torch.dtype, overlapped: bool
) -> None:
    if overlapped:
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("launches overlap on Hopper and newer GPUs")
        height, tiles = choose_tiles(batch, 90, 2)
        tiles = {name: replace(tile, overlapped=True) for name, tile in tiles.items()}
        monkeypatch.setattr(fused_step, "choose_tiles", lambda *_: (height, tiles))
    model = make_model(dtype=dtype, d_model=528, num_heads=3, vocab_size=1000).cuda()
    ids, state = torch.arange(batch, device="cuda"), model.initial_state(batch)
    truth = make_model(dtype=torch.float64, d_model=528, num_heads=3, vocab_size=1000).cuda()
    truth.load_state_dict(model.state_dict())
    expected = truth(ids[:, None])[:, 0]

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).norm() / expected.norm())

    fused, own = FusedStep(model, batch)(ids, model.initial_state(batch))[0], model.step(ids, state)[0]
    assert error(fused) <= 1.25 * error(own) + 1e-4


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

    assert why(make(), batch=64) is None
    assert why(make(), batch=65) == "it is for mLSTMs and up to 64 sequences"
    assert why(make("attention")) == "it is for mLSTMs and up to 64 sequences"
    assert unsupported(make(), make().initial_state(99), 3) is None
    assert why(make().double()) == "it takes no weights of torch.float64"
    for cap in ("gate_soft_cap", "logit_soft_cap"):
        assert why(make(**{cap: 1000.0})) is None
        assert why(make(**{cap: 1001.0})) == "its tanh is exact enough for soft caps up to 1,000"
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
