"""Where text comes from: files, folders, lines of JSON, Hugging Face datasets. One document after the other."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfla.train.config import Data
from tfla.train.messages import UserError, reason

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
