"""Where text comes from: files, folders, Hugging Face datasets. One document after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tfla.train.config import Data
from tfla.train.messages import UserError, reason


class Document(NamedTuple):
    """A text: where it is from, for messages, and its bytes."""

    name: str
    content: bytes


def documents(config: Data) -> Iterator[Document]:
    """All documents that are not empty, in an order that does not depend on the machine.

    Raises:
        UserError: nothing is found, or something cannot be read; the message names it.
    """
    source = _dataset(config) if config.dataset is not None else _files(config)
    return (document for document in source if document.content)


def find_files(config: Data) -> list[Path]:
    """The files of config.paths, sorted in every folder; none twice.

    Raises:
        UserError: a path is not there or cannot be listed, or no file is found.
    """
    found: dict[Path, None] = {}
    for path in config.paths:
        if path.is_dir():
            found |= dict.fromkeys(_folder(path, config))
        elif path.exists() or path.is_symlink():
            found[path] = None
        else:
            raise UserError(f"{path}: no such file or folder")
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


def _files(config: Data) -> Iterator[Document]:
    for path in find_files(config):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {reason(error)}") from error
        yield Document(str(path), content)


def _dataset(config: Data) -> Iterator[Document]:
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
    for number, text in enumerate(rows[config.dataset_field]):
        yield Document(f"{name}[{number}]", (text or "").encode())
