"""Text to tokens and back. A document starts with one token of its own, which also ends the document before it."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfla.train.documents import Document
from tfla.train.messages import UserError, reason

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
