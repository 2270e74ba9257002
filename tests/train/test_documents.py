"""Documents: the files that are found, lines of JSON, pipes and datasets."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest

from tfla._util.errors import UserError
from tfla.train.config import Data
from tfla.train.documents import Documents


def test_folders_are_read_sorted_with_suffixes_and_exclusions(tmp_path):
    for name in ("b/2.txt", "a/1.txt", "a/tests/0.txt", "a/skip.bin", "a/3.py"):
        path = tmp_path / "top" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "named.bin").write_bytes(b"\xff\x00")
    config = Data(paths=(tmp_path / "top", tmp_path / "named.bin", tmp_path / "top" / "b"), exclude=("tests",))
    assert [d.content for d in Documents(config)] == [b"a/1.txt", b"a/3.py", b"b/2.txt", b"\xff\x00"]


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("x")
    assert [d.content for d in Documents(Data(paths=(tmp_path,)))] == [b"x"]


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="missing: no such file or folder"):
        list(Documents(Data(paths=(tmp_path / "missing",))))


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "picture.png").touch()
    with pytest.raises(UserError, match=rf"{tmp_path}: no files that end in .txt"):
        list(Documents(Data(paths=(tmp_path,))))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
        list(Documents(Data(paths=(tmp_path,))))


def test_lines_of_json_are_documents(tmp_path):
    rows = [{"text": "one", "body": "eins"}, {"text": "", "body": "zwei\n"}, {"text": "drei ü", "body": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    found = Documents(Data(paths=(path,)))
    for _ in range(2):  # they can be read again
        assert [(d.name, d.content.decode()) for d in found] == [
            (f"{path}: line 1", "one"),
            (f"{path}: line 3", "drei ü"),
        ]
    assert [d.content for d in Documents(Data(paths=(path,), dataset_field="body"))] == [b"eins", b"zwei\n"]
    in_folder = Data(paths=(tmp_path,), suffixes=(".jsonl",))
    assert [d.content.decode() for d in Documents(in_folder)] == ["one", "drei ü"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows\.ndjson: line 2: expected a JSON object"),
        ("[1]", r"rows\.ndjson: line 2: got a JSON list, expected an object"),
        ('{"body": "x", "id": 3}', r"data\.dataset_field: .*line 2 has no field 'text', but body, id"),
        ('{"text": 5}', r"data\.dataset_field: 'text' of .*line 2 is of type int, expected text"),
        ('{"text": "\\ud800"}', r"line 2: 'text' has half a surrogate pair at character 0"),
        ("[" * 100_000, r"line 2: expected a JSON object"),
    ],
)
def test_invalid_lines_of_json_are_named(tmp_path, line, message):
    (tmp_path / "rows.ndjson").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match=message) as caught:
        list(Documents(Data(paths=(tmp_path / "rows.ndjson",))))
    assert "\n" not in str(caught.value)


def test_parts_of_files_are_read_from_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 2000)
    whole = next(iter(Documents(Data(paths=(tmp_path,)))))
    assert whole.content == bytes(range(256)) * 2000
    assert max(map(len, whole.blocks())) < whole.size
    part = whole.part(1000, 500_001).part(5, 400_000)
    assert (part.start, part.size, part.content) == (1005, 399_995, whole.content[1005:401_000])
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(UserError, match=r"a\.txt: has become shorter while it was read"):
        _ = whole.content


def test_pipes_are_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"through the pipe",), daemon=True)
    writer.start()
    found = Documents(Data(paths=(tmp_path / "pipe",)))
    writer.join()
    assert [d.content for d in found] == [d.content for d in found] == [b"through the pipe"]


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "tfla\[datasets\]"'):
        list(Documents(Data(dataset="anything")))


def test_hugging_face_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": "one"}, {"text": ""}, {"text": "zwei ü"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    on_disk = Data(dataset=str(tmp_path / "saved"))
    assert [d.content.decode() for d in Documents(on_disk)] == ["one", "zwei ü"]

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    generic = Data(dataset="json", dataset_files=(str(tmp_path / "rows.jsonl"),))
    assert [d.content.decode() for d in Documents(generic)] == ["one", "zwei ü"]

    with pytest.raises(UserError, match="no column 'body', but text"):
        list(Documents(Data(dataset=str(tmp_path / "saved"), dataset_field="body")))
    datasets.Dataset.from_list([{"n": 1}]).save_to_disk(tmp_path / "numbers")
    with pytest.raises(UserError, match=r"data\.dataset_field: 'n' of .*numbers\[0\] is of type int, expected text"):
        list(Documents(Data(dataset=str(tmp_path / "numbers"), dataset_field="n")))
    with pytest.raises(UserError, match=r"data\.dataset: .*rows\.jsonl.* cannot be loaded"):
        list(Documents(Data(dataset=str(tmp_path / "rows.jsonl" / "x"))))
