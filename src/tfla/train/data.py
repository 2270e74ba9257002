"""Token streams: their files on disk, the held-out split, and the batches that are read from them."""

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
from tfla._util.files import MANIFEST, atomic_directory, verify_manifest, write_manifest
from tfla.train.config import Data
from tfla.train.documents import AnyDocument, Document, Documents, FileDocument
from tfla.train.memory import size_text
from tfla.train.tokenizer import ByteTokenizer, Tokenizer, create_tokenizer, load_tokenizer

# If fewer documents than this would be held out, the end of each document is held out instead.
MIN_HELDOUT_DOCUMENTS = 10
BATCH_SPANS, BATCH_BYTES = 64, 1 << 21  # the most spans, and about the most bytes, that are tokenized at once
SLOW_BYTES = 1 << 31  # bytes that take seconds to read
FILES = "train.bin", "heldout.bin", "heldout_bytes.bin"


@dataclass(frozen=True)
class Tokens:
    """The token streams of a run."""

    train: NDArray[np.integer]
    """(N,) tokens to train on, one document after the other."""
    heldout: NDArray[np.integer]
    """(M,) tokens to evaluate on, likewise."""
    heldout_bytes: NDArray[np.integer]
    """(M,) bytes of text that each held-out token stands for; 0 for bos."""
    tokenizer: Tokenizer
    source: str
    """The source of the text, for messages."""


def prepare_tokens(
    config: Data,
    directory: Path,
    accept: Callable[[Tokens], object] = lambda tokens: None,
    tokenizer: Tokenizer | None = None,
) -> Tokens:
    """Return the tokens that a directory holds, after tokenizing the text into it if it does not exist.

    Args:
        config: the text and the tokenizer.
        directory: the directory of the token files.
        accept: called with the tokens; if it raises, new tokens are not kept.
        tokenizer: the tokenizer that config names, if it is loaded already.

    Raises:
        UserError: text is missing or cannot be read, a file is not text, the existing tokens are broken, or the disk is
            full; the message names the file.
    """
    if directory.exists():
        tokens = _load(config, directory)
        accept(tokens)
        return tokens
    tokenizer = tokenizer or create_tokenizer(config.tokenizer, config.bos_token)
    try:
        with atomic_directory(directory) as folder:
            _tokenize(config, tokenizer, folder)
            accept(read_tokens(config, folder))
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {reason(error)}") from error
    return read_tokens(config, directory)


def _load(config: Data, directory: Path) -> Tokens:
    """Return the tokens of an existing directory after a comparison with its manifest."""
    if (directory / MANIFEST).exists():
        size = sum(path.stat().st_size for path in directory.iterdir())
        if size >= SLOW_BYTES:
            notice(f"{directory}: compares {size_text(size)} of tokens with their digests")
        broken = verify_manifest(directory)
        if broken is not None:
            raise UserError(f"{directory}: its tokens cannot be read: {broken}; delete it to tokenize the text again")
    else:
        notice(f"{directory}: made by an earlier version, so nothing shows whether its tokens are complete")
    return read_tokens(config, directory)


def read_tokens(config: Data, directory: Path) -> Tokens:
    """Return the tokens of a directory as memory maps, without a comparison with their digests."""
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
            f"{directory}: its tokens cannot be read: {reason(error)}; delete it to tokenize the text again"
        ) from error
    return Tokens(
        train=streams[0],
        heldout=streams[1],
        heldout_bytes=streams[2],
        tokenizer=load_tokenizer(directory),
        source=source,
    )


def _map(path: Path, dtype: np.dtype) -> NDArray[np.integer]:
    """Return the numbers of a file as a memory map."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")


def fingerprint(directory: Path) -> str | None:
    """Return the digest of the tokens to train on; None for a directory without manifest, of an earlier version."""
    try:
        return json.loads((directory / MANIFEST).read_text())["files"][FILES[0]]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokenize(config: Data, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the text of a config into the token files of a folder."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    source = Documents(config)
    check = _TextCheck(config.binary, isinstance(tokenizer, ByteTokenizer))
    with ExitStack() as files:
        train, heldout, sizes = (files.enter_context(open(folder / name, "wb")) for name in FILES)
        bar = files.enter_context(
            tqdm(
                total=source.size, unit="B", unit_scale=True, desc="tokens", delay=2, leave=False, dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 10,
            )
        )  # fmt: skip
        documents = split_heldout(source, config.heldout, config.split_seed)
        for batch in _batches(_spans(tokenizer, documents, check)):
            kept, held_out = ([span for span in batch if span.heldout is part] for part in (False, True))
            # Every span is tokenized with bos, which only the first span of a document keeps.
            for span, ids in zip(kept, tokenizer.encode([s.text for s in kept]), strict=True):
                _append(train, ids[0 if span.first else 1 :], dtype)
            encoded = tokenizer.encode_with_lengths([s.text for s in held_out])
            for span, (ids, lengths) in zip(held_out, encoded, strict=True):
                _append(heldout, ids[0 if span.first else 1 :], dtype)
                _append(sizes, lengths[0 if span.first else 1 :], np.dtype(np.uint32))
            bar.update(sum(span.text.size for span in batch))
    check.report()
    tokenizer.save(folder)
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.name}) + "\n")
    write_manifest(folder)


def _append(file: BinaryIO, values: NDArray[np.integer], dtype: np.dtype) -> None:
    """Write numbers to a file in a dtype."""
    file.write(values.astype(dtype).tobytes())


def split_heldout(source: Iterable[AnyDocument], heldout: float, seed: int) -> Iterator[tuple[AnyDocument, bool]]:
    """Return each document, and whether it is held out.

    A hash of its content and of the seed decides, so that equal documents stay together. If fewer than
    MIN_HELDOUT_DOCUMENTS documents would be held out, each document is split instead, and its end is held out.

    Args:
        source: the documents, which are iterated over twice.
        heldout: the fraction to hold out.
        seed: the seed of the hash.
    """
    many = any(number * heldout >= MIN_HELDOUT_DOCUMENTS for number, _ in enumerate(source, 1))
    for document in source:
        if many:
            digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little", signed=True))
            for block in document.blocks():
                digest.update(block)
            yield document, int.from_bytes(digest.digest(), "little") < heldout * 2**64
        else:
            cut = round(document.size * (1 - heldout))
            after = document.part(cut, min(cut + 3, document.size)).content
            cut += next(
                (n for n, byte in enumerate(after) if byte & 0xC0 != 0x80), len(after)
            )  # not within a character
            parts = (document.part(0, cut), False), (document.part(cut, document.size), True)
            yield from (part for part in parts if part[0].size)


class _Span(NamedTuple):
    """A span of a document that is tokenized at once."""

    text: Document
    first: bool
    """Whether the span starts the document."""
    heldout: bool


def _spans(
    tokenizer: Tokenizer, documents: Iterable[tuple[AnyDocument, bool]], check: Callable[[AnyDocument], Iterator[bytes]]
) -> Iterator[_Span]:
    """Return the spans of documents, which come with whether they are held out; ``check`` returns their blocks."""
    for document, heldout in documents:
        at = document.start
        for content in tokenizer.split(check(document)):
            yield _Span(text=Document(document.name, content, at), first=at == document.start, heldout=heldout)
            at += len(content)


def _batches(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Group spans into batches that are tokenized at once."""
    batch: list[_Span] = []
    size = 0
    for span in spans:
        batch.append(span)
        size += span.text.size
        if len(batch) == BATCH_SPANS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _TextCheck:
    """A check that files hold text.

    Args:
        binary: whether to accept any bytes.
        bytewise: whether the tokenizer takes bytes that are not UTF-8, as the byte tokenizer does.
    """

    def __init__(self, binary: bool, bytewise: bool) -> None:
        self.binary, self.bytewise = binary, bytewise
        self.not_utf8: dict[str, None] = {}

    def __call__(self, document: AnyDocument) -> Iterator[bytes]:
        """Return the blocks of a document, each after its check.

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
        """Print one line that names the files that are not UTF-8, if there are any."""
        names = list(self.not_utf8)
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notice(f"{names[0]}{rest}: not UTF-8; the bytes are taken as they are")


class Batches:
    """The training batches: windows of context + 1 tokens of ``tokens.train``, each token once per epoch.

    Every epoch has its own random order and its own offset of the windows.

    Args:
        tokens: the token streams.
        context: number of tokens that a window predicts.
        batch_size: number of windows in a batch.
        seed: seed of the order.

    Raises:
        UserError: the stream is too short for one batch; the message names the source of the text.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int) -> None:
        self.stream, self.context, self.batch_size, self.seed = tokens.train, context, batch_size, seed
        predicted = len(self.stream) - 1
        if predicted < context * batch_size:
            raise UserError(
                f"{tokens.source}: {len(self.stream)} tokens to train on, but one batch needs "
                f"{context * batch_size + 1} (context {context} x batch_size {batch_size} + 1)"
            )
        # One window fewer leaves room to shift the windows from epoch to epoch.
        self.windows = max(batch_size, predicted // context - 1)
        self.slack = predicted - self.windows * context
        self._epoch = lru_cache(2)(self._draw)

    def _draw(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        """Return the offset of the windows of an epoch, and their order."""
        generator = np.random.default_rng((self.seed, epoch))
        return int(generator.integers(self.slack + 1)), generator.permutation(self.windows)

    def __call__(self, step: int) -> Tensor:
        """Return the batch of a step, counted from 0: (batch_size, context + 1) int64."""
        rows = []
        for number in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, position = divmod(number, self.windows)
            offset, order = self._epoch(epoch)
            start = offset + int(order[position]) * self.context
            rows.append(self.stream[start : start + self.context + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def heldout_windows(tokens: Tokens, context: int, max_windows: int | None) -> list[slice]:
    """Return the windows of ``tokens.heldout``, each with the tokens that it predicts and the token before them.

    Args:
        tokens: the token streams.
        context: number of tokens that a window predicts; the last window may have fewer.
        max_windows: the largest number of windows, evenly spread; None is all, which together predict every token but
            the first once.

    Raises:
        UserError: there are fewer than two held-out tokens.
    """
    predicted = len(tokens.heldout) - 1
    if predicted < 1:
        raise UserError(
            f"{tokens.source}: nothing is held out; give more text, or raise data.heldout, or change data.split_seed"
        )
    starts = np.arange(0, predicted, context)
    if max_windows is not None and max_windows < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, max_windows).round().astype(int)]
    return [slice(int(s), min(int(s) + context, predicted) + 1) for s in starts]
