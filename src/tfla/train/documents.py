"""Documents: the texts of files, of lines of JSON, and of Hugging Face datasets."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError, reason
from tfla.train.config import Data

BLOCK_BYTES = 1 << 18  # bytes of a document that are in memory at once
JSON_LINES = (".jsonl", ".ndjson")
ONE_SPLIT, SPLITS = "state.json", "dataset_dict.json"  # which save_to_disk writes for a dataset, and for several


@dataclass(frozen=True)
class Document:
    """A text in memory."""

    name: str
    """The source of the text, for messages."""
    content: bytes
    start: int = 0
    """The position of the first byte in the source."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.content)

    def blocks(self) -> Iterator[bytes]:
        """Return the bytes in order, at most BLOCK_BYTES at once."""
        return (self.content[at : at + BLOCK_BYTES] for at in range(0, self.size, BLOCK_BYTES))

    def part(self, start: int, stop: int) -> Document:
        """Return the bytes from ``start`` to ``stop`` as a document."""
        return Document(self.name, self.content[start:stop], self.start + start)


@dataclass(frozen=True)
class FileDocument:
    """A text that is read from its file each time it is needed, so that it may be larger than memory."""

    path: Path
    start: int
    """The position of the first byte in the file."""
    size: int
    """The number of bytes."""

    @property
    def name(self) -> str:
        """The source of the text, for messages."""
        return str(self.path)

    @property
    def content(self) -> bytes:
        """All bytes."""
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes]:
        """Return the bytes in order, at most BLOCK_BYTES at once.

        Raises:
            UserError: the file cannot be read, or it has become shorter.
        """
        left = self.size
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                while left:
                    block = file.read(min(BLOCK_BYTES, left))
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
    """The documents that a config names, without empty ones, in an order that is the same on every machine.

    They can be iterated over repeatedly.

    Raises:
        UserError: no document is found, or a source cannot be read; the message names it.
    """

    def __init__(self, config: Data) -> None:
        self.config = config
        self._rows = None if config.dataset is None else _load_rows(config)
        self._files = [] if config.dataset is not None else [_open_file(path) for path in find_files(config)]

    @property
    def size(self) -> int | None:
        """The number of bytes of all texts, for a progress bar; None if it is not known before reading."""
        complete = self._rows is None and not any(file.name.endswith(JSON_LINES) for file in self._files)
        return sum(file.size for file in self._files) if complete else None

    def __iter__(self) -> Iterator[AnyDocument]:
        documents = self._from_files() if self._rows is None else _from_rows(self.config, self._rows)
        return (document for document in documents if document.size)

    def _from_files(self) -> Iterator[AnyDocument]:
        """Yield the documents of the files."""
        for file in self._files:
            if file.name.endswith(JSON_LINES):
                yield from _from_json_lines(file, self.config.dataset_field)
            else:
                yield file


def unread_options(config: Data) -> dict[str, str]:
    """Return the options that differ from their defaults but are not read, by name, and why not."""
    found: dict[str, str] = {}
    if config.dataset is None:
        found["dataset_split"] = "without data.dataset, which it is for"
        if not _names_json_lines(config):
            found["dataset_field"] = f"without data.dataset or files that end in {' or '.join(JSON_LINES)}"
    else:
        found |= dict.fromkeys(("suffixes", "exclude", "binary"), "with data.dataset, but it is for data.paths")
        saved = _saved_dataset(config.dataset)
        without = f"for {config.dataset!r}, which save_to_disk has written without it"
        if saved is not None:
            found |= dict.fromkeys(("dataset_config", "dataset_files"), without)
        if saved == ONE_SPLIT:
            found["dataset_split"] = without
    return {name: why for name, why in found.items() if getattr(config, name) != getattr(Data(), name)}


def _names_json_lines(config: Data) -> bool:
    """Return whether files of JSON lines may be among those that a config names."""
    endings = ((ending, suffix) for ending in JSON_LINES for suffix in config.suffixes)
    of_folders = any(ending.endswith(suffix) or suffix.endswith(ending) for ending, suffix in endings)
    return of_folders or any(str(path).endswith(JSON_LINES) for path in config.paths)


def _saved_dataset(name: str) -> str | None:
    """Return the file by which a folder is one that save_to_disk wrote; None if it is none."""
    return next((file for file in (ONE_SPLIT, SPLITS) if os.path.isfile(os.path.join(name, file))), None)


def find_files(config: Data) -> list[Path]:
    """Return the files that ``config.paths`` names, sorted within each folder and without duplicates.

    Raises:
        UserError: a path does not exist or cannot be listed, or no file is found.
    """
    found: dict[Path, None] = {}
    for path in config.paths:
        try:
            is_folder = stat.S_ISDIR(path.lstat().st_mode) or path.is_dir()
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file or folder") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read: {reason(error)}") from error
        found |= dict.fromkeys(_list_folder(path, config) if is_folder else [path])
    if not found:
        where = ", ".join(map(str, config.paths))
        raise UserError(
            f"{where}: no files that end in {' '.join(config.suffixes)} (data.suffixes says which are read)"
        )
    return list(found)


def _list_folder(top: Path, config: Data) -> Iterator[Path]:
    """Return the files with one of the config's suffixes below a folder, without the excluded folders."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed: {reason(error)}") from error

    for folder, subfolders, files in os.walk(top, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in config.exclude)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(config.suffixes))


def _open_file(path: Path) -> AnyDocument:
    """Return a file as a document; a pipe, which can be read only once, is read into memory."""
    try:
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            return FileDocument(path, 0, info.st_size)
        if not stat.S_ISFIFO(info.st_mode):
            raise UserError(f"{path}: neither a file nor a folder nor a pipe")
        return Document(str(path), path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


def _from_json_lines(file: AnyDocument, field: str) -> Iterator[Document]:
    """Return the text in a field of each line, which is a JSON object; blank lines are skipped."""
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        where = f"{file.name}: line {number}"
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
        yield _text_document(row[field], field, where)


def _lines(file: AnyDocument) -> Iterator[bytes]:
    """Yield the lines of a file."""
    if isinstance(file, Document):
        yield from file.content.split(b"\n")
        return
    try:
        with open(file.path, "rb") as stream:
            yield from stream
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {reason(error)}") from error


def _load_rows(config: Data) -> Any:
    """Return the dataset that a config names, reduced to the column with the text."""
    try:
        import datasets
    except ImportError as error:
        raise UserError('data.dataset needs the library datasets: pip install "tfla[datasets]"') from error
    name = str(config.dataset)
    try:
        if _saved_dataset(name) is not None:
            loaded = datasets.load_from_disk(name)
            rows = loaded[config.dataset_split] if isinstance(loaded, dict) else loaded
        else:
            files = {config.dataset_split: list(config.dataset_files)} if config.dataset_files else None
            rows = datasets.load_dataset(name, config.dataset_config, data_files=files, split=config.dataset_split)
    except Exception as error:  # the library raises many types
        raise UserError(f"data.dataset: {name} cannot be loaded: {reason(error)}") from error
    if config.dataset_field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UserError(f"data.dataset_field: {name} has no column {config.dataset_field!r}, but {columns}")
    return rows.select_columns([config.dataset_field])


def _from_rows(config: Data, rows: Any) -> Iterator[Document]:
    """Return the text of each row of a dataset."""
    number = 0
    for batch in rows.iter(batch_size=64):
        for value in batch[config.dataset_field]:
            yield _text_document(value, config.dataset_field, f"{config.dataset}[{number}]")
            number += 1


def _text_document(value: Any, field: str, where: str) -> Document:
    """Return the value of a field as a document; None is an empty one."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"data.dataset_field: {field!r} of {where} is of type {type(value).__name__}, expected text")
    try:
        return Document(where, (value or "").encode())
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {field!r} has half a surrogate pair at character {error.start}") from error
