"""Token streams, the held-out split and batches."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tfla._util.errors import UserError
from tfla.train import data as tokens_module
from tfla.train.config import Data
from tfla.train.data import Batches, Tokens, heldout_windows, prepare_tokens, split_heldout
from tfla.train.documents import BLOCK_BYTES, Document
from tfla.train.tokenizer import ByteTokenizer


def stream(n: int, heldout: int = 50) -> Tokens:
    """Return streams whose tokens are their positions, so that windows show where they come from."""
    return Tokens(np.arange(n), np.arange(heldout), np.ones(heldout, int), ByteTokenizer(), "here.txt")


def test_streams_hold_every_document_once(texts, tmp_path):
    tokens = prepare_tokens(Data(paths=(texts,), heldout=0.5), tmp_path / "tokens")
    assert isinstance(tokens.train, np.memmap)
    found = set()
    for part in (tokens.train, tokens.heldout):
        assert part[0] == 256
        found |= {
            bytes(document.astype(np.uint8))
            for document in np.split(part, np.flatnonzero(part == 256))
            if len(document)
        }
    assert {document[1:] for document in found} == {path.read_bytes() for path in texts.iterdir()}
    assert 5 <= (tokens.heldout == 256).sum() <= 25
    assert tokens.heldout_bytes.sum() == (tokens.heldout != 256).sum()


def test_a_run_keeps_its_first_tokens(texts, tmp_path):
    config = Data(paths=(texts,))
    first = np.array(prepare_tokens(config, tmp_path / "tokens").train)
    (texts / "later.txt").write_text("something new")
    assert np.array_equal(prepare_tokens(config, tmp_path / "tokens").train, first)


def test_whether_a_document_is_held_out_depends_on_its_content_and_the_seed():
    documents = [Document(str(n), b"text %d" % (n // 2)) for n in range(400)]
    held = [h for _, h in split_heldout(documents, 0.25, 0)]
    assert held[::2] == held[1::2]  # equal texts go together
    backwards = {d.content: h for d, h in split_heldout(documents[::-1], 0.25, 0)}
    assert all(backwards[d.content] == h for d, h in zip(documents, held, strict=True))
    assert 0.15 < np.mean(held) < 0.35
    assert held != [h for _, h in split_heldout(documents, 0.25, 1)]


def test_the_ends_of_few_documents_are_held_out():
    documents = [Document("a", "x" * 79 + "ü" + "y" * 19), Document("b", "z" * 10)]
    parts = list(split_heldout([Document(d.name, d.content.encode()) for d in documents], 0.2, 0))
    assert [(d.name, d.content.decode(), held) for d, held in parts] == [
        ("a", "x" * 79 + "ü", False),  # 80 bytes would cut the letter in two
        ("a", "y" * 19, True),
        ("b", "z" * 8, False),
        ("b", "zz", True),
    ]


def test_broken_tokens_are_named(texts, tmp_path):
    config = Data(paths=(texts,))
    prepare_tokens(config, tmp_path / "tokens")
    (tmp_path / "tokens" / "train.bin").unlink()
    with pytest.raises(UserError, match="tokens: its tokens cannot be read"):
        prepare_tokens(config, tmp_path / "tokens")


@pytest.mark.parametrize("file", ["train.bin", "heldout.bin", "heldout_bytes.bin", "meta.json", "tokenizer_info.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "longer"])
def test_damaged_tokens_are_not_trained_on(texts, tmp_path, file, damage):
    config = Data(paths=(texts,))
    prepare_tokens(config, tmp_path / "tokens")
    path = tmp_path / "tokens" / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        # An even number of bytes, so that what is left is whole tokens.
        cut = content[: len(content) // 4 * 2]
        path.write_bytes({"cut": cut, "changed": content[:-1] + b"\x01", "longer": content * 2}[damage])
    with pytest.raises(
        UserError, match=rf"tokens: its tokens cannot be read: {file}.*; delete it to tokenize the text again"
    ):
        prepare_tokens(config, tmp_path / "tokens")


@pytest.mark.parametrize("lines", [False, True])
def test_a_progress_bar_shows_how_much_text_is_done(texts, tmp_path, monkeypatch, lines):
    bars = []

    class Bar(tokens_module.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            bars.append(self)

    monkeypatch.setattr(tokens_module, "tqdm", Bar)
    if lines:
        (texts / "rows.jsonl").write_text('{"text": "' + "x" * 1000 + '"}\n')
    paths = (texts, *([texts / "rows.jsonl"] if lines else []))
    prepare_tokens(Data(paths=paths), tmp_path / "tokens")
    size = sum(path.stat().st_size for path in texts.glob("*.txt")) + 1000 * lines
    assert [(bar.n, bar.total) for bar in bars] == [(size, None if lines else size)]


def test_a_long_comparison_is_announced(texts, tmp_path, monkeypatch, capsys):
    config = Data(paths=(texts,))
    prepare_tokens(config, tmp_path / "tokens")
    prepare_tokens(config, tmp_path / "tokens")
    assert "compares" not in capsys.readouterr().err
    monkeypatch.setattr(tokens_module, "SLOW_BYTES", 1)
    prepare_tokens(config, tmp_path / "tokens")
    assert "tokens: compares " in capsys.readouterr().err


def test_tokens_of_an_earlier_version_are_used_with_a_notice(texts, tmp_path, capsys):
    config = Data(paths=(texts,))
    before = np.array(prepare_tokens(config, tmp_path / "tokens").train)
    (tmp_path / "tokens" / "manifest.json").unlink()
    assert np.array_equal(prepare_tokens(config, tmp_path / "tokens").train, before)
    assert "tokens: made by an earlier version" in capsys.readouterr().err
    (tmp_path / "tokens" / "heldout.bin").write_bytes(b"ab" * 10)
    with pytest.raises(UserError, match=r"heldout\.bin has 10 entries, heldout_bytes\.bin has"):
        prepare_tokens(config, tmp_path / "tokens")


def test_tokens_that_are_refused_are_dropped(texts, tmp_path):
    def refuse(tokens: Tokens) -> None:
        assert len(tokens.train) > 1000
        raise UserError("too few")

    with pytest.raises(UserError, match="too few"):
        prepare_tokens(Data(paths=(texts,)), tmp_path / "tokens", refuse)
    assert not list(tmp_path.glob("*tokens*"))


@pytest.mark.parametrize("content", [b"PK\x03\x04\x14\x00\x08", b"x" * 300_000 + b"\0", "utf-16".encode("utf-16")])
@pytest.mark.parametrize("more", [0, 300])  # documents: few are split, of many some are held out
def test_binary_files_are_named(texts, tmp_path, content, more):
    for number in range(more):
        (texts / f"{number}.md").write_text(f"text {number}")
    (texts / "model.txt").write_bytes(content)
    config = Data(paths=(texts,), heldout=0.3)
    zero = content.index(0)
    with pytest.raises(
        UserError, match=rf"model\.txt: byte {zero} is 0, so this is not text .* --data\.binary"
    ) as caught:
        prepare_tokens(config, tmp_path / "tokens")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokens").exists()
    tokens = prepare_tokens(replace(config, binary=True), tmp_path / "tokens")
    assert (tokens.train == 0).sum() + (tokens.heldout == 0).sum() == content.count(0)


def test_text_that_is_not_utf8_is_mentioned(texts, tmp_path, capsys):
    (texts / "latin.txt").write_bytes("für".encode("latin-1") * 200_000)
    (texts / "other.txt").write_bytes(b"\xff" * 100)
    tokens = prepare_tokens(Data(paths=(texts,), heldout=0.3), tmp_path / "tokens")
    assert (tokens.train == 0xFC).sum() + (tokens.heldout == 0xFC).sum() == 200_000
    err = capsys.readouterr().err
    assert f"{texts / 'latin.txt'} and 1 more: not UTF-8; the bytes are taken as they are" in err
    prepare_tokens(Data(paths=(texts / "00.txt",), heldout=0.3), tmp_path / "others")
    assert "UTF-8" not in capsys.readouterr().err


@pytest.mark.parametrize("heldout", [0.2, 0.001])
def test_large_documents_give_the_tokens_of_the_whole(texts, tmp_path, bpe_file, heldout):
    """Documents are tokenized in spans, by a tokenizer that splits at white space."""
    draw = random.Random(0)
    words = ["the", "then", "theme", "gate", "gates", "Grüße", "你好 🙂", "12.5", "\n", "\n\n ", "  x"]
    text = "".join(draw.choice(words) + " " * draw.randint(0, 1) for _ in range(200_000))
    (tmp_path / "big.txt").write_text(text, newline="")
    paths = (tmp_path / "big.txt", texts)
    tokens = prepare_tokens(Data(paths=paths, heldout=heldout, tokenizer=str(bpe_file)), tmp_path / "tokens")
    whole = tokens.tokenizer
    documents = [Document(path.name, path.read_bytes()) for path in [paths[0], *sorted(texts.iterdir())]]
    assert documents[0].size > 3 * BLOCK_BYTES
    pairs = list(split_heldout(documents, heldout, 0))
    learned = np.concatenate(whole.encode([d for d, held in pairs if not held]))
    assert np.array_equal(tokens.train, learned)
    ids, lengths = (
        np.concatenate(x) for x in zip(*whole.encode_with_lengths([d for d, held in pairs if held]), strict=True)
    )
    assert np.array_equal(tokens.heldout, ids)
    assert np.array_equal(tokens.heldout_bytes, lengths)


def test_what_fails_leaves_no_tokens(texts, tmp_path):
    (texts / "zz.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"zz\.txt"):
        prepare_tokens(Data(paths=(texts,)), tmp_path / "tokens")
    assert not list(tmp_path.glob("*tokens*"))


def test_an_epoch_predicts_each_token_at_most_once_and_nearly_all():
    batches = Batches(stream(1003), context=10, batch_size=4, seed=0)
    epoch = torch.cat([batches(step)[:, 1:].flatten() for step in range(batches.windows // 4)])
    assert len(epoch.unique()) == len(epoch)
    assert len(epoch) > 1003 - 20 - 4 * 10
    assert batches(0).shape == (4, 11)
    assert batches(0).dtype == torch.int64


def test_batches_depend_on_seed_and_step_alone():
    a, b = (Batches(stream(1003), 10, 4, seed=0) for _ in range(2))
    late = [a(step) for step in (70, 3, 70)]
    assert torch.equal(late[0], late[2])
    assert torch.equal(b(3), late[1])
    assert not torch.equal(b(0), Batches(stream(1003), 10, 4, seed=1)(0))
    borders = {int(b(step)[0, 0]) % 10 for step in range(0, 200, 25)}
    assert len(borders) > 1  # shifted from epoch to epoch


def test_the_smallest_text_that_makes_a_batch():
    rows = Batches(stream(41), context=10, batch_size=4, seed=0)(5)
    assert sorted(rows[:, 0].tolist()) == [0, 10, 20, 30]
    with pytest.raises(UserError, match=r"here\.txt: 40 tokens to train on, but one batch needs 41"):
        Batches(stream(40), context=10, batch_size=4, seed=0)


def test_heldout_windows_predict_every_token_once():
    windows = heldout_windows(stream(9, heldout=46), 10, None)
    predicted = [n for w in windows for n in range(w.start + 1, w.stop)]
    assert predicted == list(range(1, 46))
    few = heldout_windows(stream(9, heldout=46), 10, 3)
    assert [w.start for w in few] == [0, 20, 40]
    with pytest.raises(UserError, match=r"here\.txt: nothing is held out"):
        heldout_windows(stream(9, heldout=1), 10, None)
