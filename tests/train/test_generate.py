"""Generation of text with a trained model, and ``tfla generate``."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch

from tfla._util.errors import UserError
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import GenerateConfig, Optim
from tfla.train.loop import train
from tfla.train.sample import continue_text, sample
from tfla.train.tokenizer import ByteTokenizer


@pytest.fixture
def run(tiny):
    """Return a run whose model has learned that letters are more likely than other bytes."""
    return train(tiny(steps=40, optim=Optim(lr=1e-2, warmup_steps=2, cooldown_steps=2), eval_every=40)).run


def text(run, **options) -> str:
    return "".join(sample(GenerateConfig(run, device="cpu", **{"max_new_tokens": 40, **options})))


def test_the_same_seed_gives_the_same_text(run):
    assert text(run, seed=1) == text(run, seed=1) != text(run, seed=2)
    greedy = text(run, temperature=0)
    assert greedy == text(run, top_k=1, seed=5) == text(run, top_p=1e-9, seed=6)


def test_text_follows_the_prompt_and_the_model(run):
    assert text(run, temperature=0, prompt="ga") != text(run, temperature=0, prompt="ke")
    letters = text(run, seed=0, max_new_tokens=200, temperature=0.5)
    assert set(letters) <= set("abcdefghijklmnopqrstuvwxyz \n")


def test_runs_checkpoints_and_models_work(run):
    checkpoint = next((run / "checkpoints").glob("step-00000040"))
    assert text(run, seed=0) == text(checkpoint, seed=0)


def test_the_command_writes_prompt_and_text(run, capsys):
    args = ["generate", "--checkpoint", str(run), "--prompt", "gate ", "--max-new-tokens", "20", "--seed", "3"]
    assert main([*args, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == "gate " + text(run, prompt="gate ", max_new_tokens=20, seed=3) + "\n"
    assert re.fullmatch(r"20 tokens, [\d,]+\.\d tokens/s after the first\n", err)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--top-k", "0"], "top_k"), (["--temperature", "-1"], "temperature"), (["--max-new-tokens", "0"], "max_new")],
)
def test_options_out_of_range_are_named(run, capsys, options, message):
    assert main(["generate", "--checkpoint", str(run), *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("tfla: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_model_is_named(tmp_path, capsys):
    assert main(["generate", "--checkpoint", str(tmp_path / "nowhere")]) == 1
    assert f"{tmp_path / 'nowhere'}: neither a run" in capsys.readouterr().err
    LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer_info\.json and no tokenizer\.json .* --tokenizer bytes$"):
        sample(GenerateConfig(tmp_path))


def test_the_end_of_the_document_ends_the_text():
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257))
    with torch.no_grad():
        model.norm.weight.zero_()  # all tokens alike
    config = GenerateConfig("", max_new_tokens=100_000, seed=0)
    parts = list(continue_text(model, ByteTokenizer(), config))
    assert 1 < len(parts) < 10_000  # 1 in 257 ends it


def tensors() -> list[torch.Tensor]:
    """Return all tensors of this process that the garbage collector knows."""
    return [x for x in gc.get_objects() if type(x) is torch.Tensor]


def test_memory_does_not_grow_with_the_text():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=2, num_heads=2, vocab_size=257))
    with torch.no_grad():
        model.unembedding.weight[256] = 0
        model.norm.weight.mul_(30)  # so that the end is never drawn
    parts = continue_text(model, ByteTokenizer(), GenerateConfig("", prompt="a", max_new_tokens=10**9, seed=0))
    gc.collect()
    others = tensors()  # held here, since what other tests left behind may go at any moment
    known = {id(x) for x in others}
    alive = []
    for _ in range(3):
        assert len(list(itertools.islice(parts, 200))) == 200
        gc.collect()
        alive.append(sorted(x.numel() for x in tensors() if id(x) not in known))
    assert alive[0] == alive[1] == alive[2]
    assert alive[0]  # the states of the text are seen


@pytest.fixture
def saved(tmp_path):
    """Return a saved model without a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "saved"
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=300))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def words(tmp_path):
    """Return a tokenizer.json of another library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"<s>": 0, "state": 1, "gate": 2, "[UNK]": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    inner.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words" / "tokenizer.json"


def test_a_saved_model_needs_a_tokenizer(saved, words, capsys):
    options = {"device": "cpu", "seed": 0, "max_new_tokens": 9}
    assert isinstance("".join(sample(GenerateConfig(saved, tokenizer="bytes", **options))), str)
    named = list(sample(GenerateConfig(saved, tokenizer=str(words), **options)))
    assert named == list(sample(GenerateConfig(saved, tokenizer=str(words.parent), **options)))
    (saved / "tokenizer.json").write_bytes(words.read_bytes())
    assert list(sample(GenerateConfig(saved, **options))) == named
    ByteTokenizer().save(saved)  # what tfla has saved goes first
    assert list(sample(GenerateConfig(saved, **options))) == list(
        sample(GenerateConfig(saved, tokenizer="bytes", **options))
    )
    args = ["generate", "--checkpoint", str(saved), "--tokenizer", "bytes", "--device", "cpu", "--max-new-tokens", "2"]
    assert main(args) == 0


def refused(capsys, *args) -> str:
    """Return the one-line error of ``tfla generate``."""
    assert main(["generate", *map(str, args)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfla: error: ")
    assert err.count("\n") == 1
    return err


def test_tokenizers_that_do_not_fit_are_named(saved, words, tmp_path, capsys):
    at = ["--checkpoint", saved, "--device", "cpu"]
    assert "tokenizer: got 'nope', expected \"bytes\", a tokenizer.json or a folder" in refused(
        capsys, *at, "--tokenizer", "nope"
    )
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json: cannot be read as a tokenizer" in refused(capsys, *at, "--tokenizer", tmp_path / "broken.json")
    small = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=100))
    small.save_pretrained(tmp_path / "small")
    message = "tokenizer: got one of 257 tokens, expected at most 100, the model's"
    assert message in refused(capsys, "--checkpoint", tmp_path / "small", "--tokenizer", "bytes", "--device", "cpu")
    for text in ("[]", "{}", '{"kind": "huggingface"}'):
        (saved / "tokenizer_info.json").write_text(text)
        assert "tokenizer_info.json: cannot be read" in refused(capsys, *at)


def test_missing_devices_are_named(saved, capsys):
    for device in ("foo", "meta", *([] if torch.cuda.is_available() else ["cuda"])):
        message = f"device: got '{device}'"
        assert message in refused(capsys, "--checkpoint", saved, "--tokenizer", "bytes", "--device", device)


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_download_of_xlstm_7b_names_what_loads_it(tmp_path, capsys, weights):
    (tmp_path / "config.json").write_text('{"model_type": "xlstm", "embedding_dim": 4096}')
    (tmp_path / weights).write_text("{}")
    assert "tfla.integrations.transformers.load_xlstm" in refused(capsys, "--checkpoint", tmp_path)


def test_a_model_whose_weights_are_not_finite_writes_nothing(saved, capsys):
    model = LanguageModel.from_pretrained(saved)
    with torch.no_grad():
        model.unembedding.weight[7] = torch.nan
    model.save_pretrained(saved)
    args = ["--checkpoint", saved, "--tokenizer", "bytes", "--device", "cpu"]
    for options in ([], ["--temperature", "0"]):
        assert "logits: got NaN or infinity, expected finite numbers" in refused(capsys, *args, *options)


def test_broken_files_are_named(saved, capsys):
    args = ["--checkpoint", saved, "--tokenizer", "bytes", "--device", "cpu"]
    (saved / "model.safetensors").write_bytes(b"no")
    assert "model.safetensors: not a complete safetensors file" in refused(capsys, *args)
    LanguageModel(ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=300)).save_pretrained(saved / "other")
    (saved / "other" / "model.safetensors").replace(saved / "model.safetensors")
    assert "its tensors do not fit" in refused(capsys, *args)
    (saved / "config.json").write_text("{")
    assert "config.json: " in refused(capsys, *args)
