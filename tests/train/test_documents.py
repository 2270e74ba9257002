"""Finding and reading text."""

from __future__ import annotations

import json
import sys

import pytest

from tfla.train.config import Data
from tfla.train.documents import documents
from tfla.train.messages import UserError


def test_folders_are_read_sorted_with_suffixes_and_exclusions(tmp_path):
    for name in ("b/2.txt", "a/1.txt", "a/tests/0.txt", "a/skip.bin", "a/3.py"):
        path = tmp_path / "top" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "named.bin").write_bytes(b"\xff\x00")
    config = Data(paths=(tmp_path / "top", tmp_path / "named.bin", tmp_path / "top" / "b"), exclude=("tests",))
    assert [d.content for d in documents(config)] == [b"a/1.txt", b"a/3.py", b"b/2.txt", b"\xff\x00"]


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("x")
    assert [d.content for d in documents(Data(paths=(tmp_path,)))] == [b"x"]


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="missing: no such file or folder"):
        list(documents(Data(paths=(tmp_path / "missing",))))


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "picture.png").touch()
    with pytest.raises(UserError, match=rf"{tmp_path}: no files that end in .txt"):
        list(documents(Data(paths=(tmp_path,))))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
        list(documents(Data(paths=(tmp_path,))))


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "tfla\[datasets\]"'):
        list(documents(Data(dataset="anything")))


def test_hugging_face_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": "one"}, {"text": ""}, {"text": "zwei ü"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    on_disk = Data(dataset=str(tmp_path / "saved"))
    assert [d.content.decode() for d in documents(on_disk)] == ["one", "zwei ü"]

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    generic = Data(dataset="json", dataset_files=(str(tmp_path / "rows.jsonl"),))
    assert [d.content.decode() for d in documents(generic)] == ["one", "zwei ü"]

    with pytest.raises(UserError, match="no column 'body', but text"):
        list(documents(Data(dataset=str(tmp_path / "saved"), dataset_field="body")))
    with pytest.raises(UserError, match=r"data\.dataset: .*rows\.jsonl.* cannot be loaded"):
        list(documents(Data(dataset=str(tmp_path / "rows.jsonl" / "x"))))
