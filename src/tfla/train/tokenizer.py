"""Tokenizers: bytes, or a tokenizer of the library ``tokenizers``.

Every document starts with one special token, bos, which also ends the document before it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfla._util.errors import UserError, reason
from tfla.train.documents import Document

INFO_FILE, TOKENIZER_FILE = "tokenizer_info.json", "tokenizer.json"
# The tokens with which common tokenizers start a document, or end it if they have no token for its start.
BOS_TOKENS = ("<|begin_of_text|>", "<|endoftext|>", "<bos>", "<s>", "[BOS]", "[CLS]", "</s>", "<eos>", "[EOS]")

Ids = NDArray[np.int64]


class Tokenizer(Protocol):
    """The interface of a tokenizer for training and generation."""

    vocab_size: int
    bos: int
    """The token that starts every document."""

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Return the tokens of each document, bos first."""

    def encode_with_lengths(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """Return the tokens of each document, and the number of its bytes that each token stands for; 0 for bos."""

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token by its text, to compare tokenizers."""

    def split(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Split a document, given in blocks of bytes, into spans that can be tokenized one by one."""

    def decoder(self, prompt: Iterable[int] = ()) -> Callable[[int], str]:
        """Return a function that takes one token and returns the text that is complete with it.

        Args:
            prompt: the tokens before the first one, whose text is not returned.
        """

    def save(self, directory: Path) -> None:
        """Write the files that :func:`load_tokenizer` reads."""


class ByteTokenizer:
    """A tokenizer whose tokens are the 256 bytes, and bos, 256, which no byte of a file can be mistaken for."""

    vocab_size, bos = 257, 256

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Return the tokens of each document, bos first."""
        return [np.concatenate([[self.bos], np.frombuffer(d.content, np.uint8)]) for d in documents]

    def encode_with_lengths(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """Return the tokens of each document and the number of bytes of each."""
        return [(ids, (ids != self.bos).astype(np.int64)) for ids in self.encode(documents)]

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token by its text."""
        return {f"byte {number}": number for number in range(256)}

    def split(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Split a document into spans that can be tokenized one by one."""
        return iter(blocks)

    def decoder(self, prompt: Iterable[int] = ()) -> Callable[[int], str]:
        """Return the decoder of :class:`Tokenizer`; invalid UTF-8 and tokens that are not bytes become U+FFFD.

        Bytes mean the same after every prompt, which is not read.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # 0xFF is never valid in UTF-8.
        return lambda token: "" if token == self.bos else decode(bytes([min(token, 0xFF)]))

    def save(self, directory: Path) -> None:
        """Write the files that :func:`load_tokenizer` reads."""
        (directory / INFO_FILE).write_text(json.dumps({"kind": "bytes"}) + "\n")


class HuggingFaceTokenizer:
    """A tokenizer of the library ``tokenizers``; documents must be UTF-8.

    Special tokens in a text are tokenized as plain text, so that only training itself sets bos.

    Args:
        inner: the tokenizer of the library. Its truncation and padding are switched off.
        bos_token: the token that starts a document; None looks for one of BOS_TOKENS.
        name: the name of the tokenizer in messages.

    Raises:
        UserError: the tokenizer does not have the token.
    """

    def __init__(self, inner: Any, bos_token: str | None, name: str) -> None:
        self.inner = inner
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.vocab_size = max(inner.get_vocab().values()) + 1  # ids may have gaps
        candidates = BOS_TOKENS if bos_token is None else (bos_token,)
        self.bos_token = next((t for t in candidates if inner.token_to_id(t) is not None), "")
        if not self.bos_token:
            raise UserError(
                f"data.bos_token: tokenizer {name} has none of {' '.join(candidates)}; name one that it has"
            )
        self.bos: int = inner.token_to_id(self.bos_token)

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Return the tokens of each document, bos first.

        Raises:
            UserError: a document is not UTF-8; the message names it.
        """
        return [self._ids(encoding) for _, encoding in self._encode(documents)]

    def encode_with_lengths(self, documents: Sequence[Document]) -> list[tuple[Ids, Ids]]:
        """Return the tokens of each document and the number of bytes of each; errors are those of :meth:`encode`."""
        return [
            (self._ids(encoding), np.concatenate([[0], _byte_lengths(text, encoding.offsets)]))
            for text, encoding in self._encode(documents)
        ]

    def _encode(self, documents: Sequence[Document]) -> Iterator[tuple[str, Any]]:
        """Yield the text of each document and its encoding, without bos."""
        texts = [self._text(document) for document in documents]
        return zip(texts, self.inner.encode_batch(texts, add_special_tokens=False), strict=True)

    def _ids(self, encoding: Any) -> Ids:
        """Return the tokens of an encoding, bos first."""
        return np.array([self.bos, *encoding.ids], np.int64)

    @staticmethod
    def _text(document: Document) -> str:
        """Return the text of a document; UserError if it is not UTF-8."""
        try:
            return document.content.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{document.name}: not UTF-8 at byte {document.start + error.start}; "
                "convert it, leave it out, or use --data.tokenizer bytes"
            ) from error

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token by its text."""
        return self.inner.get_vocab()

    def split(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Split a document into spans that can be tokenized one by one.

        A single block is one span. Of several blocks, each span ends before the last white space that follows a letter,
        so that a tokenizer that first splits text at white space gives the tokens of the whole text. A tokenizer that
        marks the start of a text marks the start of each span.
        """
        text = b""
        for block in blocks:
            at = _last_border(text)
            if at:
                yield text[:at]
            text = text[at:] + block
        yield text

    def decoder(self, prompt: Iterable[int] = ()) -> Callable[[int], str]:
        """Return the decoder of :class:`Tokenizer`."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for token in prompt:  # many tokenizers leave out the space before the first word
            stream.step(self.inner, token)
        return lambda token: stream.step(self.inner, token) or ""

    def save(self, directory: Path) -> None:
        """Write the files that :func:`load_tokenizer` reads."""
        self.inner.save(str(directory / TOKENIZER_FILE))
        (directory / INFO_FILE).write_text(json.dumps({"kind": "huggingface", "bos_token": self.bos_token}) + "\n")


_WORD_END = re.compile(rb"[A-Za-z\x80-\xff](?=[ \t\r\n])")
_WINDOW = 1 << 14  # bytes at the end of a text that are searched for the end of a word


def _last_border(text: bytes) -> int:
    """Return where the last word of a text ends; without one in the window, where the last character begins."""
    window = max(0, len(text) - _WINDOW)
    ends = [match.end() for match in _WORD_END.finditer(text, window)]
    if ends:
        return ends[-1]
    back = next((n for n in range(1, min(4, len(text)) + 1) if text[-n] & 0xC0 != 0x80), 0)
    return len(text) - back


def _byte_lengths(text: str, offsets: list[tuple[int, int]]) -> Ids:
    """Return the number of UTF-8 bytes of each token, given its (start, end) in characters; they sum to the text's."""
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    width = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    position = np.concatenate([[0], np.cumsum(width)])
    ends = position[np.array([end for _, end in offsets], np.int64)]
    if len(ends) == 0:
        return ends
    ends = np.maximum.accumulate(ends)
    ends[-1] = position[-1]  # the last token also stands for bytes that the tokenizer strips
    return np.diff(ends, prepend=0)


def create_tokenizer(name: str, bos_token: str | None) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    Args:
        name: "bytes", a tokenizer.json, or a name on the Hugging Face hub.
        bos_token: the token that starts a document; None looks for one of BOS_TOKENS.

    Raises:
        UserError: there is no such tokenizer, it cannot be read, or it does not have the token.
    """
    if name == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(name) if Path(name).is_file() else Inner.from_pretrained(name)
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f'data.tokenizer: {name} is neither "bytes" nor can it be loaded: {reason(error)}') from error
    return HuggingFaceTokenizer(inner, bos_token, name)


def find_tokenizer(directory: Path, name: str | None) -> Tokenizer:
    """Load the tokenizer of a saved model.

    Args:
        directory: the directory of the model.
        name: "bytes", a tokenizer.json or a folder with a tokenizer; None is the directory of the model.

    Raises:
        UserError: there is no tokenizer; the message says how to name one.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name is not None:
        path = Path(name)
        if path.is_file():
            return read_tokenizer_file(path)
        if not name or not any((path / file).is_file() for file in (INFO_FILE, TOKENIZER_FILE)):
            raise UserError(f'tokenizer: got {name!r}, expected "bytes", a {TOKENIZER_FILE} or a folder with one')
        return load_tokenizer(path)
    if not any((directory / file).is_file() for file in (INFO_FILE, TOKENIZER_FILE)):
        raise UserError(
            f"{directory}: no {INFO_FILE} and no {TOKENIZER_FILE} beside the model; name its tokenizer by "
            "--tokenizer PATH, or --tokenizer bytes"
        )
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer that a directory holds, saved by this library or as a tokenizer.json by another.

    Raises:
        UserError: the directory has no tokenizer, or it cannot be read.
    """
    if not (directory / INFO_FILE).is_file() and (directory / TOKENIZER_FILE).is_file():
        return read_tokenizer_file(directory / TOKENIZER_FILE)
    try:
        info = json.loads((directory / INFO_FILE).read_text())
        if info["kind"] == "bytes":
            return ByteTokenizer()
        return read_tokenizer_file(directory / TOKENIZER_FILE, info["bos_token"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / INFO_FILE}: cannot be read: {reason(error)}") from error


def read_tokenizer_file(path: Path, bos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.json.

    Args:
        path: the file.
        bos_token: the token that starts a document; None looks for one of BOS_TOKENS.

    Raises:
        UserError: the file cannot be read, or the tokenizer does not have the token.
    """
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{path}: cannot be read as a tokenizer: {reason(error)}") from error
    return HuggingFaceTokenizer(inner, bos_token, str(path))
