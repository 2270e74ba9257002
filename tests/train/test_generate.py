"""Text from a trained model."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch

from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import GenerateConfig, Optim
from tfla.train.loop import train
from tfla.train.messages import UserError
from tfla.train.sample import continue_text, sample
from tfla.train.tokenizer import ByteTokenizer


@pytest.fixture
def run(tiny):
    """A run whose model has learned that letters are more likely than other bytes."""
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


def test_every_kind_of_path_works(run):
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


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["generate", "--checkpoint", str(tmp_path / "nowhere")]) == 1
    assert f"{tmp_path / 'nowhere'}: neither a run" in capsys.readouterr().err
    LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer_info\.json: cannot be read"):
        sample(GenerateConfig(tmp_path))


def test_the_end_of_the_document_ends_the_text():
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257))
    with torch.no_grad():
        model.norm.weight.zero_()  # all tokens alike
    config = GenerateConfig("", max_new_tokens=100_000, seed=0)
    pieces = list(continue_text(model, ByteTokenizer(), config))
    assert 1 < len(pieces) < 10_000  # 1 in 257 ends it


def test_memory_does_not_grow_with_the_text():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=2, num_heads=2, vocab_size=257))
    with torch.no_grad():
        model.unembedding.weight[256] = 0
        model.norm.weight.mul_(30)  # so that the end is never drawn
    pieces = continue_text(model, ByteTokenizer(), GenerateConfig("", prompt="a", max_new_tokens=10**9, seed=0))
    alive = []
    for _ in range(3):
        assert len(list(itertools.islice(pieces, 200))) == 200
        gc.collect()
        alive.append(sorted(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor))
    assert alive[0] == alive[1] == alive[2]
