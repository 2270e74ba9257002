"""`tfla.integrations.fla.patch`: programs and models that were written for flash-linear-attention compute with tfla."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import error

import tfla
from tfla.integrations import fla as ours
from tfla.integrations.fla.replacement import MODULES


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Undo patches after a test."""
    yield
    ours.restore()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that has imported a function of the package under a name of its own."""
    pytest.importorskip("fla", reason='pip install "tfla[baselines]"')
    module = types.ModuleType("program_for_fla")
    exec("from fla.ops.kda import chunk_kda as attention, fused_recurrent_kda", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 2, 8), F.normalize(torch.randn(2, 20, 2, 8), dim=-1), torch.randn(2, 20, 2, 4)
    return [q, k, v, F.logsigmoid(torch.randn(2, 20, 2, 8) + 3), torch.rand(2, 20, 2)]


def test_a_program(program: types.ModuleType) -> None:
    original = program.attention
    ours.patch()
    ours.patch()
    assert torch.equal(program.attention(*inputs())[0], ours.chunk_kda(*inputs())[0])
    exec("from fla.ops.kda import chunk_kda as later", vars(program))
    assert program.later is program.attention
    assert program.later.__name__ == "chunk_kda"
    with pytest.raises(ValueError, match=r"cp_context: got .*which tfla does not support"):
        program.attention(*inputs(), cp_context=object())
    ours.restore()
    assert program.attention is original
    assert program.later is original
    assert ours.chunk_kda.__module__ == "tfla.integrations.fla.kda"


def test_a_patch_that_failed_is_tried_again(program: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of the package may lack a function."""
    original = program.attention
    with monkeypatch.context() as without:
        without.delattr("fla.ops.rwkv7.chunk_rwkv7")
        with pytest.raises(AttributeError, match="chunk_rwkv7"):
            ours.patch()
    assert program.attention is original
    ours.patch()
    assert program.attention is not original


def test_every_function_of_the_package_is_covered() -> None:
    pytest.importorskip("fla", reason='pip install "tfla[baselines]"')
    own = {name: f"tfla.integrations.fla.{module}" for module in MODULES for name in _names(module)}
    assert set(own) == set(ours.__all__) - {"patch", "restore"}
    before = {name: getattr(importlib.import_module(f"fla.ops.{module}"), name) for name, module in _places().items()}
    ours.patch()
    for name, module in _places().items():
        assert getattr(importlib.import_module(f"fla.ops.{module}"), name) is not before[name]
    ours.restore()
    for name, module in _places().items():
        assert getattr(importlib.import_module(f"fla.ops.{module}"), name) is before[name]


def _names(module: str) -> list[str]:
    return list(importlib.import_module(f"tfla.integrations.fla.{module}").__all__)


def _places() -> dict[str, str]:
    return {name: module for module in MODULES for name in _names(module)}


def qwen3_next() -> Any:
    """A tiny model with a layer of Gated DeltaNet, whose keys are shared by two heads."""
    from transformers import Qwen3NextConfig, Qwen3NextModel

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=1,
        linear_num_value_heads=2, num_experts=0,
        layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1],
    )  # fmt: skip
    return Qwen3NextModel(config).eval()


def kimi_linear() -> Any:
    """A tiny model with a layer of KDA."""
    from transformers import KimiLinearConfig, KimiLinearModel

    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8,
        qk_nope_head_dim=4, num_local_experts=2, num_experts_per_tok=1, linear_head_dim=8, linear_num_heads=2,
        mlp_layer_types=["dense", "dense"],
        layer_types=["linear_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return KimiLinearModel(config).eval()


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (qwen3_next, ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")),
        (kimi_linear, ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")),
    ],
    ids=["Qwen3-Next", "Kimi-Linear"],
)
@pytest.mark.parametrize("loaded_after", [False, True])
def test_models_of_transformers(
    monkeypatch: pytest.MonkeyPatch, build: Any, names: tuple[str, str], loaded_after: bool
) -> None:
    """Whether a model is loaded before the patch or after it, tfla computes what its own functions compute."""
    pytest.importorskip("transformers", reason='pip install "tfla[transformers]"')
    where = sys.modules[type(build()).__module__]
    tokens = torch.randint(3, 50, (2, 70))

    def run() -> list[torch.Tensor]:
        model = build()
        with torch.no_grad():
            whole = model(tokens).last_hidden_state
            first = model(tokens[:, :-1], use_cache=True)
            step = model(tokens[:, -1:], past_key_values=first.past_key_values, use_cache=True)
        return [whole, first.last_hidden_state, step.last_hidden_state]

    with monkeypatch.context() as patched:  # their own functions in plain PyTorch, which the package would replace
        for name in names:
            patched.setattr(where, name, getattr(where, name).__wrapped__)
        expected = run()
    before = [getattr(where, name) for name in names]
    if loaded_after:
        ours.patch()
        where = importlib.reload(where)
        monkeypatch.setitem(sys.modules, where.__name__, where)
    else:
        ours.patch()
    calls = []
    for name in ("delta_rule", "delta_rule_steps"):
        monkeypatch.setattr(tfla, name, _counted(getattr(tfla, name), calls))
    found = run()
    assert calls == ["delta_rule", "delta_rule", "delta_rule_steps"]
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
    during = [getattr(where, name) for name in names]
    ours.restore()
    after = [getattr(where, name) for name in names]
    assert all(a is not b for a, b in zip(during, after, strict=True))
    assert loaded_after or all(a is b for a, b in zip(before, after, strict=True))


def _counted(function: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted
