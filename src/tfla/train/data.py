"""Token files and the batches that are read from them."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from tfla._util.errors import UserError, notice, reason
from tfla._util.files import MANIFEST, what_is_broken, whole_directory, write_manifest
from tfla.train import tokenizer as tokenizers
from tfla.train.config import Data
from tfla.train.memory import size_text
from tfla.train.tokenizer import AnyDocument, ByteTokenizer, Document, FileDocument, Tokenizer, documents


class Batches:
    """Windows of context + 1 tokens, each token once an epoch, in an order drawn anew for every epoch.

    Args:
        tokens: the stream is tokens.train.
        context: tokens a window predicts.
        batch_size: windows in a batch.
        seed: of the order.

    Raises:
        UserError: the stream is too short for one batch; the message names where the text is from.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int) -> None:
        self.stream, self.context, self.batch_size, self.seed = tokens.train, context, batch_size, seed
        predicted = len(self.stream) - 1
        if predicted < context * batch_size:
            raise UserError(
                f"{tokens.source}: {len(self.stream)} tokens to train on, but one batch needs "
                f"{context * batch_size + 1} (context {context} x batch_size {batch_size} + 1)"
            )
        # One window fewer leaves room to shift the borders from epoch to epoch.
        self.windows = max(batch_size, predicted // context - 1)
        self.slack = predicted - self.windows * context
        self._epoch = lru_cache(2)(self._draw)

    def _draw(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        generator = np.random.default_rng((self.seed, epoch))
        return int(generator.integers(self.slack + 1)), generator.permutation(self.windows)

    def __call__(self, step: int) -> Tensor:
        """The batch of a step, counted from 0: (batch_size, context + 1) int64."""
        rows = []
        for number in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, position = divmod(number, self.windows)
            offset, order = self._epoch(epoch)
            start = offset + int(order[position]) * self.context
            rows.append(self.stream[start : start + self.context + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def heldout_windows(tokens: Tokens, context: int, most: int | None) -> list[slice]:
    """Where the held-out windows lie in tokens.heldout: each slice has the tokens it predicts and one before.

    Args:
        context: tokens a window predicts; the last window may have fewer.
        most: how many windows at most, evenly spread; None is all, which predict every token but the first, once.

    Raises:
        UserError: there are fewer than two held-out tokens.
    """
    predicted = len(tokens.heldout) - 1
    if predicted < 1:
        raise UserError(
            f"{tokens.source}: nothing is held out; give more text, or raise data.heldout, or change data.split_seed"
        )
    starts = np.arange(0, predicted, context)
    if most is not None and most < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    return [slice(int(s), min(int(s) + context, predicted) + 1) for s in starts]


# Where fewer documents than this would be held out, whole ones are too coarse a measure: each gives its end.
FEW = 10
BATCH, BATCH_BYTES = 64, 1 << 21  # pieces of text that a tokenizer gets at once, and their bytes
LARGE = 1 << 31  # bytes that take seconds to read
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


def prepare(
    config: Data,
    directory: Path,
    accept: Callable[[Tokens], object] = lambda tokens: None,
    tokenizer: Tokenizer | None = None,
) -> Tokens:
    """The tokens in directory; made first if they are not there.

    Args:
        config: the text and the tokenizer.
        directory: of the tokens.
        accept: gets the tokens before they have their place, and raises if they are of no use: new ones are dropped.
        tokenizer: the one that config names, if it is loaded already.

    Raises:
        UserError: text is missing, is no text or cannot be read, tokens that are there are broken, or the disk is full;
            the message names what.
    """
    if directory.exists():
        tokens = _load(config, directory)
        accept(tokens)
        return tokens
    tokenizer = tokenizer or tokenizers.create(config.tokenizer, config.bos_token)
    try:
        with whole_directory(directory) as folder:
            _make(config, tokenizer, folder)
            accept(_read(config, folder))
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {reason(error)}") from error
    return _read(config, directory)


def split(source: Iterable[AnyDocument], heldout: float, seed: int) -> Iterator[tuple[AnyDocument, bool]]:
    """Each document with whether it is held out, which its content and the seed decide: equal ones go together.

    Where that would be fewer than ten, each document is cut in two instead, its end being held out.

    Args:
        source: the documents, which are read twice.
        heldout: the part that is held out.
        seed: draws it.
    """
    many = any(number * heldout >= FEW for number, _ in enumerate(source, 1))
    for document in source:
        if many:
            digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little", signed=True))
            for block in document.blocks():
                digest.update(block)
            yield document, int.from_bytes(digest.digest(), "little") < heldout * 2**64
        else:
            cut = round(document.size * (1 - heldout))
            after = document.part(cut, min(cut + 3, document.size)).content
            cut += next((n for n, byte in enumerate(after) if byte & 0xC0 != 0x80), len(after))  # whole characters
            parts = (document.part(0, cut), False), (document.part(cut, document.size), True)
            yield from (part for part in parts if part[0].size)


class _Piece(NamedTuple):
    """A part of a document that is tokenized at once."""

    text: Document
    first: bool
    """Whether it begins the document."""
    heldout: bool


class _TextCheck:
    """A check that files hold text, block by block.

    Args:
        binary: accept any bytes.
        bytewise: whether bytes that are no UTF-8 are usable, as they are for the byte tokenizer.
    """

    def __init__(self, binary: bool, bytewise: bool) -> None:
        self.binary, self.bytewise = binary, bytewise
        self.not_utf8: dict[str, None] = {}

    def __call__(self, document: AnyDocument) -> Iterator[bytes]:
        """Return the blocks of a document.

        Raises:
            UserError: the document is a binary file.
        """
        if self.binary or not isinstance(document, FileDocument):
            yield from document.blocks()
            return
        decode = codecs.getincrementaldecoder("utf-8")().decode
        at = document.start
        for block in document.blocks():
            zero = block.find(0)
            if zero >= 0:
                raise UserError(
                    f"{document.name}: byte {at + zero} is 0, so this is not text in UTF-8; leave the file out, or "
                    "convert it, or give --data.binary with the tokenizer bytes to train on files of any kind"
                )
            at += len(block)
            if self.bytewise and document.name not in self.not_utf8:
                try:
                    decode(block, at == document.start + document.size)
                except UnicodeDecodeError:
                    self.not_utf8[document.name] = None
            yield block

    def report(self) -> None:
        """Print one line on files that are not UTF-8, if there were any."""
        names = list(self.not_utf8)
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notice(f"{names[0]}{rest}: not UTF-8; the bytes are taken as they are")


def _pieces(
    tokenizer: Tokenizer, pairs: Iterable[tuple[AnyDocument, bool]], check: Callable[[AnyDocument], Iterator[bytes]]
) -> Iterator[_Piece]:
    for document, held in pairs:
        at = document.start
        for content in tokenizer.cut(check(document)):
            yield _Piece(Document(document.name, content, at), at == document.start, held)
            at += len(content)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.text.size
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _make(config: Data, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    source = documents(config)
    check = _TextCheck(config.binary, isinstance(tokenizer, ByteTokenizer))
    with ExitStack() as files:
        train, heldout, sizes = (files.enter_context(open(folder / name, "wb")) for name in FILES)
        bar = files.enter_context(
            tqdm(
                total=source.size, unit="B", unit_scale=True, desc="tokens", delay=2, leave=False, dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 10,
            )
        )  # fmt: skip
        pairs = split(source, config.heldout, config.split_seed)
        for batch in _batches(_pieces(tokenizer, pairs, check)):
            learned, held = ([p for p in batch if p.heldout is wanted] for wanted in (False, True))
            for piece, ids in zip(learned, tokenizer.encode([p.text for p in learned]), strict=True):
                _append(train, ids[0 if piece.first else 1 :], dtype)
            for piece, (ids, lengths) in zip(held, tokenizer.measure([p.text for p in held]), strict=True):
                _append(heldout, ids[0 if piece.first else 1 :], dtype)
                _append(sizes, lengths[0 if piece.first else 1 :], np.dtype(np.uint32))
            bar.update(sum(piece.text.size for piece in batch))
    check.report()
    tokenizer.save(folder)
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.name}) + "\n")
    write_manifest(folder)


def _append(file: BinaryIO, values: NDArray[np.integer], dtype: np.dtype) -> None:
    file.write(values.astype(dtype).tobytes())


def _load(config: Data, directory: Path) -> Tokens:
    """Read tokens that are there already; they are what they were when they were made."""
    if (directory / MANIFEST).exists():
        size = sum(path.stat().st_size for path in directory.iterdir())
        if size >= LARGE:
            notice(f"{directory}: compares {size_text(size)} of tokens with their digests")
        broken = what_is_broken(directory)
        if broken is not None:
            raise UserError(f"{directory}: its tokens cannot be read: {broken}; remove it to make them anew")
    else:
        notice(f"{directory}: made by an earlier version, so nothing shows whether its tokens are whole")
    return _read(config, directory)


def fingerprint(directory: Path) -> str | None:
    """Return the digest of the tokens to train on, to compare them; None for those of an earlier version."""
    try:
        return json.loads((directory / MANIFEST).read_text())["files"][FILES[0]]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(config: Data, directory: Path) -> Tokens:
    source = str(config.dataset) if config.dataset is not None else ", ".join(map(str, config.paths))
    try:
        dtype = np.dtype(json.loads((directory / "meta.json").read_text())["dtype"])
        streams = [
            _map(directory / name, kind) for name, kind in zip(FILES, (dtype, dtype, np.dtype(np.uint32)), strict=True)
        ]
        if len(streams[1]) != len(streams[2]):
            raise ValueError(f"{FILES[1]} has {len(streams[1])} entries, {FILES[2]} has {len(streams[2])}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory}: its tokens cannot be read: {reason(error)}; remove it to make them anew"
        ) from error
    return Tokens(streams[0], streams[1], streams[2], tokenizers.load(directory), source)


def _map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    if path.stat().st_size == 0:  # which no system maps
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
