"""The text as two memory-mapped streams of tokens, one to train on and one held out.

Tokens are made once and kept in the run's folder, so a run that continues reads exactly what it read before.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tfla.train import tokenizer as tokenizers
from tfla.train.config import Data
from tfla.train.documents import Document, documents
from tfla.train.messages import UserError, reason
from tfla.train.storage import whole_directory
from tfla.train.tokenizer import Tokenizer

# Where fewer documents than this would be held out, whole ones are too coarse a measure: each gives its end.
FEW = 10
BATCH = 64
FILES = "train.bin", "heldout.bin", "heldout_bytes.bin"


@dataclass(frozen=True)
class Tokens:
    """What a run trains on and what it is measured on."""

    train: NDArray[np.integer]
    """(N,) tokens, documents one after the other."""
    heldout: NDArray[np.integer]
    """(M,) tokens, likewise."""
    heldout_bytes: NDArray[np.integer]
    """(M,) bytes of text behind each held-out token; 0 for the token that starts a document."""
    tokenizer: Tokenizer
    source: str
    """Where the text is from, for messages."""


def prepare(config: Data, directory: Path) -> Tokens:
    """The tokens in directory; made first if they are not there.

    Raises:
        UserError: text is missing or cannot be read, or the disk is full; the message names what.
    """
    if not directory.exists():
        _make(config, directory)
    return _load(config, directory)


def split(source: Iterable[Document], heldout: float, seed: int) -> Iterator[tuple[Document, bool]]:
    """Each document with whether it is held out, which its content and the seed decide: equal ones go together.

    Where that would be fewer than ten, each document is cut in two instead, its end being held out.
    """
    source = iter(source)
    first = list(islice(source, math.ceil(FEW / heldout)))
    if len(first) * heldout < FEW:
        for name, content in first:
            cut = round(len(content) * (1 - heldout))
            while cut < len(content) and content[cut] & 0xC0 == 0x80:  # not inside a character of UTF-8
                cut += 1
            parts = (Document(name, content[:cut]), False), (Document(name, content[cut:]), True)
            yield from (part for part in parts if part[0].content)
        return
    for document in chain(first, source):
        digest = hashlib.blake2b(document.content, digest_size=8, key=seed.to_bytes(8, "little", signed=True)).digest()
        yield document, int.from_bytes(digest, "little") < heldout * 2**64


def _make(config: Data, directory: Path) -> None:
    tokenizer = tokenizers.create(config.tokenizer, config.bos_token)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    try:
        with whole_directory(directory) as folder, ExitStack() as files:
            train, heldout, sizes = (files.enter_context(open(folder / name, "wb")) for name in FILES)
            bar = files.enter_context(tqdm(unit="B", unit_scale=True, desc="tokens", delay=2, leave=False))
            pairs = split(documents(config), config.heldout, config.split_seed)
            while batch := list(islice(pairs, BATCH)):
                for ids in tokenizer.encode([d for d, held in batch if not held]):
                    _append(train, ids, dtype)
                for ids, lengths in tokenizer.measure([d for d, held in batch if held]):
                    _append(heldout, ids, dtype)
                    _append(sizes, lengths, np.dtype(np.uint32))
                bar.update(sum(len(d.content) for d, _ in batch))
            tokenizer.save(folder)
            (folder / "meta.json").write_text(json.dumps({"dtype": dtype.name}) + "\n")
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {reason(error)}") from error


def _append(file: BinaryIO, values: NDArray[np.integer], dtype: np.dtype) -> None:
    file.write(values.astype(dtype).tobytes())


def _load(config: Data, directory: Path) -> Tokens:
    source = str(config.dataset) if config.dataset is not None else ", ".join(map(str, config.paths))
    try:
        dtype = np.dtype(json.loads((directory / "meta.json").read_text())["dtype"])
        streams = [
            _map(directory / name, kind) for name, kind in zip(FILES, (dtype, dtype, np.dtype(np.uint32)), strict=True)
        ]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{directory}: its tokens cannot be read: {reason(error)}; remove it to make them anew"
        ) from error
    return Tokens(streams[0], streams[1], streams[2], tokenizers.load(directory), source)


def _map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    if path.stat().st_size == 0:  # which no system maps
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
