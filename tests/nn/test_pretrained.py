"""Saving and loading models."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tfla._util.files import write_atomically
from tfla.integrations.transformers import load_xlstm
from tfla.nn import LanguageModel

Make = Callable[..., LanguageModel]


def test_a_loaded_model_equals_the_saved_one(tmp_path: Path, mixer: str, make_model: Make, ids: Tensor) -> None:
    model = make_model(mixer, torch.float32)
    model.save_pretrained(tmp_path / "new" / "model")
    assert sorted(p.name for p in (tmp_path / "new" / "model").iterdir()) == ["config.json", "model.safetensors"]
    loaded = LanguageModel.from_pretrained(tmp_path / "new" / "model")
    assert loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))


def test_device_dtype_and_overrides(tmp_path: Path, make_model: Make, ids: Tensor) -> None:
    model = make_model(dtype=torch.float32, input_gate_trainable=False, chunk_size=8)
    model.save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(
        tmp_path, device=torch.device("cpu"), dtype=torch.float64, chunk_size=4, backend="reference"
    )
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert (loaded.config.chunk_size, loaded.config.backend) == (4, "reference")
    frozen = {name for name, p in loaded.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad} != set()
    torch.testing.assert_close(loaded(ids).float(), model(ids), rtol=1e-4, atol=1e-4)


def test_options_that_nobody_reads_are_loaded_but_not_given(tmp_path: Path, make_model: Make, ids: Tensor) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_size": 7, "window": 4}))
    loaded = LanguageModel.from_pretrained(tmp_path, backend="reference", window=4)
    assert (loaded.config.conv_size, loaded.config.window, loaded.config.backend) == (7, 4, "reference")
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(ids), model(ids))
    loaded.save_pretrained(tmp_path / "again")
    assert LanguageModel.from_pretrained(tmp_path / "again").config == loaded.config
    with pytest.raises(
        ValueError, match=r"config\.json: window: got 5, expected None with 'mlstm_exp': only 'attention'"
    ):
        LanguageModel.from_pretrained(tmp_path, window=5)


def test_files_are_replaced_atomically(tmp_path: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_model(seed=0)
    old.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            make_model(seed=1).save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    make_model(seed=1).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(before)


def test_the_configuration_of_a_run_is_not_replaced(tmp_path: Path, make_model: Make) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"steps": 10}')
    with pytest.raises(ValueError, match=r"directory: got .* `tfla train`; expected another directory"):
        make_model().save_pretrained(tmp_path)
    assert config.read_text() == '{"steps": 10}'
    assert list(tmp_path.iterdir()) == [config]
    config.write_text("{broken")
    make_model().save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).config == make_model().config


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, make_model: Make) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    make_model().save_pretrained(tmp_path)
    assert len({stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}) == 1


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda p: p.write_text("old"))

    def half(p: Path) -> None:
        p.write_text("ne")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, make_model: Make, missing: str) -> None:
    make_model().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError) as error:
        LanguageModel.from_pretrained(tmp_path)
    assert str(tmp_path / missing) in str(error.value)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LanguageModel.from_pretrained(tmp_path / "nowhere")


def change_config(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("config.json", lambda p: p.write_text('{"d_model": 3'), ["delimiter"]),
        ("config.json", lambda p: p.write_bytes(b"\xff\xfe"), ["utf-8"]),
        ("config.json", lambda p: p.write_text("[]"), ["list", "object"]),
        ("config.json", lambda p: change_config(p, depth=3), ["depth"]),
        ("config.json", lambda p: change_config(p, num_heads=3), ["num_heads: got 3"]),
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-9]), ["safetensors"]),
        ("model.safetensors", lambda p: p.write_bytes(b""), ["safetensors"]),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, make_model: Make, name: str, spoil: Callable[[Path], object], words: list[str]
) -> None:
    make_model().save_pretrained(tmp_path)
    spoil(tmp_path / name)
    with pytest.raises(ValueError) as error:
        LanguageModel.from_pretrained(tmp_path)
    assert all(word in str(error.value) for word in [str(tmp_path / name), *words]), error.value


@pytest.mark.parametrize("fields", [{"d_model": 64}, {"num_blocks": 1}, {"num_blocks": 3}, {"mixer": "attention"}])
def test_weights_that_do_not_fit_the_config(tmp_path: Path, make_model: Make, fields: dict[str, object]) -> None:
    make_model().save_pretrained(tmp_path)
    change_config(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=r"model\.safetensors: its tensors do not fit .*config\.json"):
        LanguageModel.from_pretrained(tmp_path)


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: model.save_pretrained(tmp_path), lambda: LanguageModel.from_pretrained(tmp_path)):
        with pytest.raises(ImportError, match=r'pip install "tfla\[train\]"'):
            call()


@pytest.mark.parametrize("weights", [["model.safetensors"], ["model.safetensors.index.json"]])
def test_another_layout_is_named_with_what_loads_it(tmp_path: Path, weights: list[str]) -> None:
    """The directories are a download of xLSTM-7B, whose weights are in shards, and of a smaller model."""
    config = {"architectures": ["xLSTMForCausalLM"], "model_type": "xlstm", "embedding_dim": 4096, "num_blocks": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in weights:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"model_type 'xlstm'.*tfla\.integrations\.transformers\.load_xlstm loads it"):
        LanguageModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "tfla"}))
    with pytest.raises(
        ValueError, match=r"model_type 'tfla'.*TflaForCausalLM\.from_pretrained\(\.\.\.\)\.to_language_m"
    ):
        LanguageModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"model_type 'llama', expected what save_pretrained of tfla.nn writes$"):
        LanguageModel.from_pretrained(tmp_path)


def test_the_other_loader_names_this_one(tmp_path: Path, make_model: Make) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got a config of tfla\.nn.*LanguageModel\.from_pretrained loads it"):
        load_xlstm(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", torch.int8, torch.complex64, torch.float8_e4m3fn, 16])
def test_weights_have_a_float_dtype(tmp_path: Path, make_model: Make, dtype: object) -> None:
    make_model().save_pretrained(tmp_path)
    for load in (LanguageModel.from_pretrained, load_xlstm):
        with pytest.raises((TypeError, ValueError), match=r"^dtype: got .*, expected "):
            load(tmp_path, dtype=dtype)
