"""The tests of weights in the layout of xLSTM-7B: models of transformers and of tfla have the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from plain_transformers import transformers, uninitialized
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfla.integrations.transformers import load_xlstm, save_xlstm
from tfla.nn import LanguageModel, ModelConfig

Make = Callable[..., Any]
Tokens = Callable[..., Tensor]
BOUND = 5 * TOLERANCE[torch.float32]
LAYOUTS: dict[str, dict[str, Any]] = {
    "7B's": {},
    "fused": {"weight_mode": "fused"},
    "other sizes": {
        "num_heads": 2, "qk_dim_factor": 1.0, "ffn_proj_factor": 1.7, "ffn_round_up_to_multiple_of": 48,
        "gate_soft_cap": 4.0, "output_logit_soft_cap": 7.0, "norm_eps": 1e-3,
    },
}  # fmt: skip


def tfla_model(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"d_model": 128, "num_blocks": 2, "num_heads": 2, "vocab_size": 61, "input_gate_bias": -1.0}
    model = LanguageModel(ModelConfig(**sizes | fields))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("fields", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_loads_what_the_library_saves(
    make_xlstm: Make, tokens: Tokens, tmp_path: Path, fields: dict[str, Any], shard: str
) -> None:
    library, ids = make_xlstm(**fields), tokens(2, 32)
    library.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "100KB")
    model = load_xlstm(tmp_path)
    assert model.num_parameters() == library.num_parameters()
    with torch.no_grad():
        expected = library(ids, use_cache=False).logits
        assert error(model(ids), expected) <= BOUND
        _, state = model(ids[:, :20], return_state=True)
        assert error(model.step(ids[:, 20], state)[0], expected[:, 20]) <= BOUND


@pytest.mark.parametrize("weight_mode", ["single", "fused"])
@pytest.mark.parametrize(
    "fields", [{}, {"ffn_multiple": 10, "qk_factor": 1.0, "norm_eps": 1e-3, "head_norm_eps": 1e-3}]
)
def test_the_library_loads_what_is_saved(
    tokens: Tokens, tmp_path: Path, weight_mode: Any, fields: dict[str, Any]
) -> None:
    model, ids = tfla_model(**fields), tokens(2, 32)
    save_xlstm(model, tmp_path, weight_mode)
    if weight_mode == "single":
        library, report = transformers.xLSTMForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
    else:  # from_pretrained initializes the weights before it loads them, which fails for "fused"
        library = uninitialized(transformers.xLSTMConfig.from_pretrained(tmp_path))
        library.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert error(library(ids, use_cache=False).logits, model(ids)) <= BOUND
        loaded = load_xlstm(tmp_path)
        assert torch.equal(loaded(ids), model(ids))
    assert loaded.config.ffn_dim == model.config.ffn_dim


def test_device_dtype_and_overrides(tokens: Tokens, tmp_path: Path) -> None:
    model = tfla_model().bfloat16()
    save_xlstm(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in load_xlstm(tmp_path).parameters()} == {torch.bfloat16}
    loaded = load_xlstm(tmp_path, torch.device("cpu"), torch.float64, backend="reference", chunk_size=8)
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert (loaded.config.backend, loaded.config.chunk_size) == ("reference", 8)


def test_a_tied_unembedding_is_a_copy(tmp_path: Path) -> None:
    save_xlstm(tfla_model(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path, tie_word_embeddings=True)
    loaded = load_xlstm(tmp_path)
    assert torch.equal(loaded.unembedding.weight, loaded.embedding.weight)


def test_a_tied_model_is_saved_with_both_weights(tokens: Tokens, tmp_path: Path) -> None:
    model, ids = tfla_model(), tokens(2, 9)
    model.unembedding.weight = model.embedding.weight
    save_xlstm(model, tmp_path)
    assert torch.equal(load_xlstm(tmp_path)(ids), model(ids))


def test_the_7b_config_has_the_7b_sizes(tmp_path: Path) -> None:
    """transformers' default config is that of NX-AI/xLSTM-7b; it gives the config of tfla's 7B model."""
    from tfla.integrations.transformers import weights

    given = transformers.xLSTMConfig().to_dict()
    config = ModelConfig.from_dict(weights._model_config(weights._library_fields(given)))
    named = ModelConfig.named("7B")
    assert config.ffn_dim == named.ffn_dim
    assert config == ModelConfig.named("7B", ffn_factor=2.667)
    with torch.device("meta"):
        assert LanguageModel(config).num_parameters() == LanguageModel(named).num_parameters()


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "'xlstm'"]),
        ({"use_bias": True}, ["use_bias", "True", "False"]),
        ({"v_dim_factor": 2.0}, ["v_dim_factor", "2.0", "1.0"]),
        ({"num_blocks": 3}, ["num_blocks", "3", "num_hidden_layers, 2"]),
        ({"embedding_dim": 64}, ["embedding_dim", "64", "hidden_size, 128"]),
        ({"num_heads": 3}, ["num_heads", "3", "divisor"]),
        ({"num_hidden_layers": 3, "num_blocks": 3}, ["tensors do not fit", "backbone.blocks.2.norm_mlstm.weight"]),
        ({"num_hidden_layers": 1, "num_blocks": 1}, ["tensors do not fit", "backbone.blocks.1.norm_mlstm.weight"]),
        ({"ffn_proj_factor": 1.0}, ["tensors do not fit", "gate_proj"]),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    save_xlstm(tfla_model(), tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(ValueError) as failed:
        load_xlstm(tmp_path)
    assert all(word in str(failed.value) for word in [str(tmp_path), *words]), failed.value


def test_fused_weights_that_do_not_fit(tmp_path: Path) -> None:
    save_xlstm(tfla_model(), tmp_path, "fused")
    change(tmp_path, qk_dim_factor=1.0)
    with pytest.raises(ValueError, match=r"qkv_opreact\.weight: got 384 rows, expected 512"):
        load_xlstm(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str) -> None:
    save_xlstm(tfla_model(), tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError) as broken:
        load_xlstm(tmp_path)
    assert str(path) in str(broken.value)
    path.unlink()
    with pytest.raises(FileNotFoundError) as missing:
        load_xlstm(tmp_path)
    assert str(path) in str(missing.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "mlstm_sig"}, "got mixer 'mlstm_sig' in its config, expected 'mlstm_exp'"),
        ({"layers": ["mlstm_exp", "gla"]}, r"got layers \('mlstm_exp', 'gla'\) in its config, expected None"),
        ({"head_norm": "rms"}, "got head_norm 'rms' in its config, expected 'layer'"),
        ({"head_norm_eps": 1e-3}, "got head_norm_eps 0.001 in its config, expected 1e-06"),
    ],
)
def test_a_model_without_a_place_in_the_layout(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_xlstm(tfla_model(**fields), tmp_path)
    with pytest.raises(ValueError, match="weight_mode: got 'double', expected 'single' or 'fused'"):
        save_xlstm(tfla_model(), tmp_path, "double")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_configuration_of_a_run_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"steps": 10}')
    with pytest.raises(ValueError, match=r"directory: got .* `tfla train`; expected another directory"):
        save_xlstm(tfla_model(), tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"steps": 10}'
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
