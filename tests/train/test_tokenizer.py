"""Tokenizers: bytes and those of the library ``tokenizers``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from tfla._util.errors import UserError
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import GenerateConfig
from tfla.train.documents import Document
from tfla.train.sample import continue_text
from tfla.train.tokenizer import ByteTokenizer, HuggingFaceTokenizer, create_tokenizer, load_tokenizer

TEXT = "naïve Grüße, 你好 🙂🙂 <|endoftext|> the the then\n"


def test_bytes_are_tokens_and_documents_start_with_256():
    ids = ByteTokenizer().encode([Document("x", b"\x00a\xff")])[0]
    assert ids.tolist() == [256, 0, 97, 255]


def test_bytes_stream_back_as_whole_characters():
    tokenizer = ByteTokenizer()
    decode = tokenizer.decoder()
    parts = [decode(int(t)) for t in tokenizer.encode([Document("x", TEXT.encode())])[0]]
    assert "".join(parts) == TEXT
    assert "�" not in parts
    assert "你" in parts


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_byte_lengths_of_tokens_add_up_to_the_document(kind, bpe_file):
    tokenizer = create_tokenizer("bytes" if kind == "bytes" else str(bpe_file), None)
    for text in (TEXT, "a", "the"):
        ids, lengths = tokenizer.encode_with_lengths([Document("x", text.encode())])[0]
        assert len(ids) == len(lengths)
        assert ids[0] == tokenizer.bos
        assert lengths[0] == 0
        assert (lengths >= 0).all()
        assert lengths.sum() == len(text.encode())
        assert np.array_equal(ids, tokenizer.encode([Document("x", text.encode())])[0])


def test_documents_are_split_after_words_or_at_least_characters(bpe_file):
    split = create_tokenizer(str(bpe_file), None).split
    one = TEXT.encode()
    assert list(split([one])) == [one]
    assert list(split([b"the then\n\n the", b" then"])) == [b"the then", b"\n\n the then"]
    for n in (1, 2, 4, 5):
        text = "你好🙂".encode()
        assert b"".join(split([text[:n], text[n:]])) == text
        assert all(part.decode() for part in split([text[:n], text[n:]]))


def test_a_hugging_face_tokenizer_gives_the_text_back(bpe_file):
    tokenizer = create_tokenizer(str(bpe_file), None)
    ids = tokenizer.encode([Document("x", TEXT.encode())])[0]
    assert tokenizer.vocab_size == tokenizer.inner.get_vocab_size() > 257
    assert (ids == tokenizer.bos).sum() == 1  # the special token inside the text is plain text
    assert len(ids) < len(TEXT.encode())
    decode = tokenizer.decoder()
    assert "".join(decode(int(t)) for t in ids) == TEXT


@pytest.mark.parametrize("kind", ["Metaspace", "WordPiece"])
def test_text_goes_on_after_a_prompt_with_its_space(kind):
    """These decoders leave out the space before the first word, which the one after a prompt is not."""
    mark = "\u2581" if kind == "Metaspace" else ""
    words = {mark + word: n for n, word in enumerate(["the", "cat", "sat"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, ""))
    splitters = {"Metaspace": tokenizers.pre_tokenizers.Metaspace, "WordPiece": tokenizers.pre_tokenizers.Whitespace}
    inner.pre_tokenizer, inner.decoder = splitters[kind](), getattr(tokenizers.decoders, kind)()
    inner.add_special_tokens(["<s>"])
    tokenizer = HuggingFaceTokenizer(inner, "<s>", "words")
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=8, num_blocks=1, num_heads=1, mixer="gla", vocab_size=4))
    found = {
        prompt: "".join(
            text
            for seed in range(8)
            for text in continue_text(
                model, tokenizer, GenerateConfig(Path(), prompt=prompt, max_new_tokens=3, seed=seed)
            )
        )
        for prompt in ("", "the cat")
    }
    assert re.fullmatch("( (the|cat|sat))+", found["the cat"])
    assert not found[""].startswith(" ")


def test_saved_tokenizers_come_back(bpe_file, tmp_path):
    for name in ("bytes", str(bpe_file)):
        tokenizer = create_tokenizer(name, None)
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        assert (again.vocab_size, again.bos) == (tokenizer.vocab_size, tokenizer.bos)
        document = Document("x", TEXT.encode())
        assert np.array_equal(again.encode([document])[0], tokenizer.encode([document])[0])


def test_errors_name_what_is_wrong(bpe_file, tmp_path):
    with pytest.raises(UserError, match=r"bad\.txt: not UTF-8 at byte 2"):
        create_tokenizer(str(bpe_file), None).encode([Document("bad.txt", b"ab\xff")])
    blocks = [b"ab cd " * 3, b"ef gh \xff"]
    parts = list(create_tokenizer(str(bpe_file), None).split(blocks))
    assert b"".join(parts) == b"".join(blocks)
    with pytest.raises(UserError, match=r"bad\.txt: not UTF-8 at byte 24"):
        create_tokenizer(str(bpe_file), None).encode([Document("bad.txt", parts[1], len(parts[0]))])
    with pytest.raises(UserError, match=r"data\.bos_token: tokenizer .*bpe\.json has none of <start>"):
        create_tokenizer(str(bpe_file), "<start>")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*broken\.json"):
        create_tokenizer(str(tmp_path / "broken.json"), None)
    with pytest.raises(UserError, match=r"tokenizer_info\.json: cannot be read"):
        load_tokenizer(tmp_path)


def test_a_hugging_face_tokenizer_takes_another_start(bpe_file):
    tokenizer = create_tokenizer(str(bpe_file), "the")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.bos == tokenizer.inner.token_to_id("the")


def test_tokens_that_are_not_bytes_become_replacement_characters():
    decode = create_tokenizer("bytes", None).decoder()
    assert "".join(decode(t) for t in (97, 300, 98)) == "a\ufffdb"
