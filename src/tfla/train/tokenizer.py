"""Text to tokens and back. A document starts with one token of its own, which also ends the document before it."""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfla._util.errors import UserError, reason
from tfla.train.config import Data

INFO, HUGGING_FACE = "tokenizer_info.json", "tokenizer.json"
# What the usual tokenizers start or, where they start nothing, end a document with.
BOS_TOKENS = ("<|begin_of_text|>", "<|endoftext|>", "<bos>", "<s>", "[BOS]", "[CLS]", "</s>", "<eos>", "[EOS]")

Ids = NDArray[np.int64]


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer."""

    vocab_size: int
    bos: int
    """The token that starts every document."""

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """The tokens of each document, bos first."""

    def measure(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """The same, and how many bytes of the document each token stands for (bos: 0)."""

    def table(self) -> dict[str, int]:
        """Return the number of each token of text by its name, to compare tokenizers."""

    def cut(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Return a document's bytes in pieces that can be tokenized one by one."""

    def decoder(self) -> Callable[[int], str]:
        """A function that takes tokens one by one and returns the text that has become certain."""

    def save(self, directory: Path) -> None:
        """Write what :func:`load` reads."""


class ByteTokenizer:
    """Every byte is a token, and token 256 starts a document.

    A number that no byte has is unmistakable in any file, and it gives generation something to start from.
    """

    vocab_size, bos = 257, 256

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """See :class:`Tokenizer`."""
        return [np.concatenate([[self.bos], np.frombuffer(d.content, np.uint8)]) for d in documents]

    def measure(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """See :class:`Tokenizer`."""
        return [(ids, (ids != self.bos).astype(np.int64)) for ids in self.encode(documents)]

    def table(self) -> dict[str, int]:
        """See :class:`Tokenizer`."""
        return {f"byte {number}": number for number in range(256)}

    def cut(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """See :class:`Tokenizer`."""
        return iter(blocks)

    def decoder(self) -> Callable[[int], str]:
        """See :class:`Tokenizer`. Bytes that are no UTF-8, and tokens that are no bytes, become U+FFFD."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # 0xFF is in no UTF-8.
        return lambda token: "" if token == self.bos else decode(bytes([min(token, 0xFF)]))

    def save(self, directory: Path) -> None:
        """See :class:`Tokenizer`."""
        (directory / INFO).write_text(json.dumps({"kind": "bytes"}) + "\n")


class HuggingFaceTokenizer:
    """A tokenizer of the library ``tokenizers``; documents must be UTF-8.

    Special tokens that stand in a text are read as plain text: only the tokens that training sets mean anything.
    """

    def __init__(self, inner: Any, bos_token: str | None, name: str) -> None:
        self.inner = inner
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.vocab_size = max(inner.get_vocab().values()) + 1  # numbers may be left out
        wanted = BOS_TOKENS if bos_token is None else (bos_token,)
        self.bos_token = next((t for t in wanted if inner.token_to_id(t) is not None), "")
        if not self.bos_token:
            raise UserError(f"data.bos_token: tokenizer {name} has none of {' '.join(wanted)}; name one that it has")
        self.bos: int = inner.token_to_id(self.bos_token)

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """See :class:`Tokenizer`.

        Raises:
            UserError: a document is not UTF-8; the message names it.
        """
        return [self._ids(encoding) for _, encoding in self._encode(documents)]

    def measure(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """See :class:`Tokenizer`; errors of :meth:`encode`."""
        return [
            (self._ids(encoding), np.concatenate([[0], _byte_lengths(text, encoding.offsets)]))
            for text, encoding in self._encode(documents)
        ]

    def _encode(self, documents: Sequence[Document]) -> Iterator[tuple[str, Any]]:
        texts = [self._text(document) for document in documents]
        return zip(texts, self.inner.encode_batch(texts, add_special_tokens=False), strict=True)

    def _ids(self, encoding: Any) -> Ids:
        return np.array([self.bos, *encoding.ids], np.int64)

    @staticmethod
    def _text(document: Document) -> str:
        try:
            return document.content.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{document.name}: not UTF-8 at byte {document.start + error.start}; "
                "convert it, leave it out, or use --data.tokenizer bytes"
            ) from error

    def table(self) -> dict[str, int]:
        """See :class:`Tokenizer`."""
        return self.inner.get_vocab()

    def cut(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """See :class:`Tokenizer`.

        What comes as one block is one piece. Of more, each ends before the last white space that follows a letter: a
        tokenizer that splits text at white space first gives what it gives for the whole, and one that marks the start
        of a text marks each piece.
        """
        text = b""
        for block in blocks:
            at = _last_border(text)
            if at:
                yield text[:at]
            text = text[at:] + block
        yield text

    def decoder(self) -> Callable[[int], str]:
        """See :class:`Tokenizer`."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self.inner, token) or ""

    def save(self, directory: Path) -> None:
        """See :class:`Tokenizer`."""
        self.inner.save(str(directory / HUGGING_FACE))
        (directory / INFO).write_text(json.dumps({"kind": "huggingface", "bos_token": self.bos_token}) + "\n")


_WORD_END = re.compile(rb"[A-Za-z\x80-\xff](?=[ \t\r\n])")
_WINDOW = 1 << 14  # bytes in which words end


def _last_border(text: bytes) -> int:
    """Return where the last word in sight ends; else where the last character begins, as in text without spaces."""
    window = max(0, len(text) - _WINDOW)
    ends = [match.end() for match in _WORD_END.finditer(text, window)]
    if ends:
        return ends[-1]
    back = next((n for n in range(1, min(4, len(text)) + 1) if text[-n] & 0xC0 != 0x80), 0)
    return len(text) - back


def _byte_lengths(text: str, offsets: list[tuple[int, int]]) -> Ids:
    """Bytes of UTF-8 behind each token, given the tokens' (start, end) in characters; they add up to the text."""
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    width = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    position = np.concatenate([[0], np.cumsum(width)])
    ends = position[np.array([end for _, end in offsets], np.int64)]
    if len(ends) == 0:
        return ends
    ends = np.maximum.accumulate(ends)
    ends[-1] = position[-1]  # what a tokenizer strips is still part of the text
    return np.diff(ends, prepend=0)


def create(name: str, bos_token: str | None) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names: "bytes", a tokenizer.json, or a name on the Hugging Face hub.

    Raises:
        UserError: there is none of that name or it cannot be read, or it has no such bos_token.
    """
    if name == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(name) if Path(name).is_file() else Inner.from_pretrained(name)
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f'data.tokenizer: {name} is neither "bytes" nor can it be loaded: {reason(error)}') from error
    return HuggingFaceTokenizer(inner, bos_token, name)


def load(directory: Path) -> Tokenizer:
    """Load the tokenizer that was saved in a directory, by tfla or as the tokenizer.json of other libraries.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not (directory / INFO).is_file() and (directory / HUGGING_FACE).is_file():
        return read_file(directory / HUGGING_FACE)
    try:
        info = json.loads((directory / INFO).read_text())
        if info["kind"] == "bytes":
            return ByteTokenizer()
        return read_file(directory / HUGGING_FACE, info["bos_token"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / INFO}: cannot be read: {reason(error)}") from error


def read_file(path: Path, bos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.json; bos_token None looks for a usual one.

    Raises:
        UserError: it cannot be read, or has no such token.
    """
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{path}: cannot be read as a tokenizer: {reason(error)}") from error
    return HuggingFaceTokenizer(inner, bos_token, str(path))


def find(directory: Path, name: str | None) -> Tokenizer:
    """Load the tokenizer of a saved model: the one that is named, or the one that lies beside the weights.

    Args:
        directory: with the model.
        name: "bytes", a tokenizer.json or a folder with a tokenizer; None is the model's folder.

    Raises:
        UserError: there is none; the message says how to name one.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name is not None:
        path = Path(name)
        if path.is_file():
            return read_file(path)
        if not any((path / file).is_file() for file in (INFO, HUGGING_FACE)):
            raise UserError(f'tokenizer: got {name!r}, expected "bytes", a {HUGGING_FACE} or a folder with one')
        return load(path)
    if not any((directory / file).is_file() for file in (INFO, HUGGING_FACE)):
        raise UserError(
            f"{directory}: no {INFO} and no {HUGGING_FACE} beside the model; name its tokenizer by --tokenizer PATH, "
            "or --tokenizer bytes"
        )
    return load(directory)


BLOCK = 1 << 18  # bytes of a document that are in memory at once
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A text in memory: where it is from, for messages, its bytes, and where in the named text they begin."""

    name: str
    content: bytes
    start: int = 0

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self.content)

    def blocks(self) -> Iterator[bytes]:
        """Return its bytes in order, at most BLOCK at once."""
        return (self.content[at : at + BLOCK] for at in range(0, self.size, BLOCK))

    def part(self, start: int, stop: int) -> Document:
        """Return the bytes from ``start`` to ``stop`` as a document."""
        return Document(self.name, self.content[start:stop], self.start + start)


@dataclass(frozen=True)
class FileDocument:
    """A text that is read from a file whenever it is needed, so that it may be larger than memory.

    Args:
        path: the file.
        start: position of the first byte.
        size: how many bytes it has.
    """

    path: Path
    start: int
    size: int

    @property
    def name(self) -> str:
        """Where it is from."""
        return str(self.path)

    @property
    def content(self) -> bytes:
        """All of its bytes."""
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes]:
        """Return its bytes in order, at most BLOCK at once.

        Raises:
            UserError: the file cannot be read, or it has become shorter.
        """
        left = self.size
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                while left:
                    block = file.read(min(BLOCK, left))
                    if not block:
                        raise UserError(f"{self.path}: has become shorter while it was read")
                    left -= len(block)
                    yield block
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {reason(error)}") from error

    def part(self, start: int, stop: int) -> FileDocument:
        """Return the bytes from ``start`` to ``stop`` as a document."""
        return FileDocument(self.path, self.start + start, stop - start)


AnyDocument = Document | FileDocument


class Documents:
    """All documents that are not empty, in an order that does not depend on the machine; it can be read repeatedly.

    Raises:
        UserError: nothing is found, or something cannot be read; the message names it.
    """

    def __init__(self, config: Data) -> None:
        self.config = config
        self._rows = None if config.dataset is None else _load_rows(config)
        self._files = [] if config.dataset is not None else [_file(path) for path in find_files(config)]

    @property
    def size(self) -> int | None:
        """Bytes of all text, for a progress bar; None where that is not known beforehand."""
        known = self._rows is None and not any(file.name.endswith(JSON_LINES) for file in self._files)
        return sum(file.size for file in self._files) if known else None

    def __iter__(self) -> Iterator[AnyDocument]:
        found = self._of_files() if self._rows is None else _of_rows(self.config, self._rows)
        return (document for document in found if document.size)

    def _of_files(self) -> Iterator[AnyDocument]:
        for file in self._files:
            if file.name.endswith(JSON_LINES):
                yield from _json_lines(file, self.config.dataset_field)
            else:
                yield file


def documents(config: Data) -> Documents:
    """Return the documents that a config names; see :class:`Documents`."""
    return Documents(config)


def find_files(config: Data) -> list[Path]:
    """The files of config.paths, sorted in every folder; none twice.

    Raises:
        UserError: a path is not there or cannot be listed, or no file is found.
    """
    found: dict[Path, None] = {}
    for path in config.paths:
        try:
            is_folder = stat.S_ISDIR(path.lstat().st_mode) or path.is_dir()
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file or folder") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read: {reason(error)}") from error
        found |= dict.fromkeys(_folder(path, config) if is_folder else [path])
    if not found:
        where = ", ".join(map(str, config.paths))
        raise UserError(
            f"{where}: no files that end in {' '.join(config.suffixes)} (data.suffixes says which are read)"
        )
    return list(found)


def _folder(top: Path, config: Data) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed: {reason(error)}") from error

    for folder, below, files in os.walk(top, onerror=refuse):
        below[:] = sorted(name for name in below if name not in config.exclude)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(config.suffixes))


def _file(path: Path) -> AnyDocument:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return FileDocument(path, 0, found.st_size)
        if not stat.S_ISFIFO(found.st_mode):
            raise UserError(f"{path}: neither a file nor a folder nor a pipe")
        return Document(str(path), path.read_bytes())  # a pipe can be read only once
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


def _lines(document: AnyDocument) -> Iterator[bytes]:
    if isinstance(document, Document):
        yield from document.content.split(b"\n")
        return
    try:
        with open(document.path, "rb") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{document.path}: cannot be read: {reason(error)}") from error


def _json_lines(document: AnyDocument, field: str) -> Iterator[Document]:
    """Return the text in that field of each line, which is a JSON object; blank lines are passed over."""
    for number, line in enumerate(_lines(document), 1):
        if not line.strip():
            continue
        where = f"{document.name}: line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: expected a JSON object: {reason(error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: got a JSON {type(row).__name__}, expected an object with the text in a field")
        if field not in row:
            raise UserError(
                f"data.dataset_field: {where} has no field {field!r}, but {', '.join(row) or 'none at all'}"
            )
        yield _text(row[field], field, where)


def _text(value: Any, field: str, where: str) -> Document:
    if value is not None and not isinstance(value, str):
        raise UserError(f"data.dataset_field: {field!r} of {where} is of type {type(value).__name__}, expected text")
    try:
        return Document(where, (value or "").encode())
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {field!r} has half a surrogate pair at character {error.start}") from error


def _load_rows(config: Data) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError('data.dataset needs the library datasets: pip install "tfla[datasets]"') from error
    name = str(config.dataset)
    try:
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            rows = loaded[config.dataset_split] if isinstance(loaded, dict) else loaded
        else:
            files = {config.dataset_split: list(config.dataset_files)} if config.dataset_files else None
            rows = datasets.load_dataset(name, config.dataset_config, data_files=files, split=config.dataset_split)
    except Exception as error:  # the library raises many kinds
        raise UserError(f"data.dataset: {name} cannot be loaded: {reason(error)}") from error
    if config.dataset_field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UserError(f"data.dataset_field: {name} has no column {config.dataset_field!r}, but {columns}")
    return rows.select_columns([config.dataset_field])


def _of_rows(config: Data, rows: Any) -> Iterator[Document]:
    number = 0
    for batch in rows.iter(batch_size=64):
        for value in batch[config.dataset_field]:
            yield _text(value, config.dataset_field, f"{config.dataset}[{number}]")
            number += 1
