"""Tiny texts, configs and a tokenizer that the tests of training share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tfla.train.config import Data, Model, Optim, TrainConfig

WORDS = ["state", "gate", "chunk", "tile", "query", "key", "value", "forget", "input", "norm", "scale", "head", "loss"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of 30 short texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(30):
        text = " ".join(draw.choice(WORDS) for _ in range(40))
        (folder / f"{number:02d}.txt").write_text(text + "\n")
    return folder


@pytest.fixture
def tiny(texts: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Return a function that makes a config of a run that takes less than a second; arguments replace its fields."""

    def make(**changes: object) -> TrainConfig:
        fields = {
            "run": tmp_path / "run",
            "data": Data(paths=(texts,), heldout=0.2),
            "model": Model(d_model=32, num_blocks=1, num_heads=2),
            "optim": Optim(warmup_steps=2, cooldown_steps=2),
            "steps": 8,
            "batch_size": 4,
            "context": 24,
            "eval_every": 4,
            "checkpoint_every": 2,
            "tensorboard": False,
            "device": "cpu",
        }
        return TrainConfig(**{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory):
    """Return the file of a byte-level BPE tokenizer, trained on a few words, with a token that ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["the then theme gate gates"] * 9, trainer)
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    inner.save(str(path))
    return path
