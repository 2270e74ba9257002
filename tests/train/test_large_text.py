"""Tokenization of a text that is larger than the memory that it may take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
from pathlib import Path
import numpy, tokenizers, torch, tqdm
from tfla.train.config import Data
from tfla.train.data import prepare_tokens

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

path, tokenizer, folder = sys.argv[1:]
prepare_tokens(Data(paths=(Path(folder) / "small.txt",), tokenizer=tokenizer), Path(folder) / "small")
before = peak()
tokens = prepare_tokens(Data(paths=(Path(path),), tokenizer=tokenizer, heldout=0.1), Path(folder) / "tokens")
print(peak() - before, len(tokens.train) + len(tokens.heldout))
"""
LINE = b"a query and a key of the gate, a chunk of the tile in 64 steps: naive words, \xc3\xbc\n"


@pytest.mark.parametrize(
    ("kind", "mebibytes", "lines", "most"),
    [("bytes", 64, False, 96), ("words", 8, False, 160), ("bytes", 64, True, 96)],
    ids=["bytes", "words", "bytes of lines of JSON"],
)
def test_memory_does_not_grow_with_the_text(tmp_path, kind, mebibytes, lines, most):
    line = b'{"text": "' + LINE[:-1] * 200 + b'"}\n' if lines else LINE
    path = tmp_path / ("big.jsonl" if lines else "big.txt")
    block = line * (2**20 // len(line))
    with open(path, "wb") as file:
        for _ in range(mebibytes):
            file.write(block)
    (tmp_path / "small.txt").write_bytes(LINE * 100)
    tokenizer = kind if kind == "bytes" else str(words(tmp_path))
    done = subprocess.run([sys.executable, "-c", CODE, path, tokenizer, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    added, tokens = map(int, done.stdout.split())
    assert added < most  # in MiB
    if kind == "words":
        assert tokens == len(block) // len(LINE) * mebibytes * len(LINE.decode().split()) + 2
    else:
        documents = len(block) // len(line) * mebibytes if lines else 2
        size = len(LINE[:-1]) * 200 * documents if lines else len(block) * mebibytes
        assert tokens == size + documents


def words(folder: Path) -> Path:
    """Return the file of a tokenizer of the library ``tokenizers`` whose tokens are words, which is fast."""
    import tokenizers

    vocabulary = {word: n for n, word in enumerate(["[BOS]", "[UNK]", *sorted(set(LINE.decode().split()))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "words.json"))
    return folder / "words.json"
