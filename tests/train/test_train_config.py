"""The options of a run, their JSON, and the folder of the run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfla._util.errors import UserError
from tfla.train.config import Data, Model, Optim, Parallel, TrainConfig, differences, from_json, to_json
from tfla.train.run_folder import check_changes, open_run, read_run_config, write_run_config

FULL = TrainConfig(
    run=Path("x/y"),
    data=Data(paths=(Path("a"), Path("b.txt")), suffixes=(".c",), bos_token="<s>"),
    model=Model(size="160M", head_norm_eps=1e-2, layers=("gla", "attention"), window=64),
    optim=Optim(betas=(0.8, 0.9), warmup_steps=3),
    threads=2,
)


def test_json_gives_the_config_back():
    assert from_json(TrainConfig, to_json(FULL)) == FULL
    assert json.loads(to_json(FULL))["data"]["paths"] == ["a", "b.txt"]
    with pytest.raises(ValueError, match="unknown field speed"):
        from_json(TrainConfig, '{"speed": 1}')


def test_differences_are_named():
    other = dataclasses.replace(FULL, seed=1, optim=dataclasses.replace(FULL.optim, lr=1.0))
    assert differences(FULL, other) == {"seed": (0, 1), "optim.lr": (3e-3, 1.0)}
    assert differences(FULL, FULL) == {}


def test_sizes_and_overrides_make_the_model():
    paper = Model(size="160M", num_blocks=2, input_gate_bias=-5.0).build(1000)
    assert (paper.d_model, paper.num_blocks, paper.num_heads, paper.vocab_size) == (768, 2, 6, 1000)
    assert paper.input_gate_bias == -5.0
    assert (Model().build(257).d_model, Model(d_model=64).build(257).d_model) == (256, 64)
    with pytest.raises(UserError, match=r"model: num_heads: got 3"):
        Model(num_heads=3).build(257)
    with pytest.raises(UserError, match=r"model\.backend: got 'abacus', allowed are .*'reference'"):
        Model(backend="abacus").build(257)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: got 0"),
        ({"accumulate": 3}, "accumulate: got 3, expected a divisor of batch_size, 4"),
        ({"data": Data(paths=(Path("x"),), heldout=1.0)}, r"data\.heldout: got 1\.0"),
        ({"data": Data()}, r"data\.paths: expected text files or folders"),
        ({"optim": Optim(lr=0.0)}, r"optim\.lr: got 0\.0"),
    ],
)
def test_values_out_of_range_are_named(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        tiny(**changes).check()


def test_a_run_keeps_its_config(tiny, capsys):
    config = tiny()
    with open_run(config) as run:
        assert read_run_config(run) is None  # nothing is written before all is known to be right
        write_run_config(None, config)
        assert read_run_config(run) == config
    changed = dataclasses.replace(config, seed=3, optim=dataclasses.replace(config.optim, lr=0.5))
    with pytest.raises(UserError, match=r"this run's optim\.lr is 0\.003, not 0\.5; seed is 0, not 3\. Take another"):
        check_changes(config, changed, 2)
    check_changes(config, changed, None)  # nothing has been learned yet
    check_changes(config, dataclasses.replace(config, steps=100, keep_last=7), 8)
    with pytest.raises(UserError, match="steps: got 7, expected at least 8, which this run has done already"):
        check_changes(config, dataclasses.replace(config, steps=7), 8)
    gathered = dataclasses.replace(config, parallel=Parallel(gather_dtype="bfloat16", reduce_dtype="bfloat16"))
    with pytest.raises(
        UserError, match=r"this run's parallel\.gather_dtype is bfloat16, not float32; parallel\.reduce"
    ):
        check_changes(gathered, config, 2)
    check_changes(gathered, config, 2, sharing=False)  # nothing is gathered any more
    write_run_config(config, dataclasses.replace(config, keep_last=7))
    assert "keep_last: 7 from here on, 2 before" in capsys.readouterr().err
    assert read_run_config(run).keep_last == 7
    for text in ("{", "[]", '{"data": 5}', '{"data": null}', '{"speed": 1}'):
        (run / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json: cannot be read"):
            read_run_config(run)


@pytest.mark.parametrize("there", [(), ("runs",), ("runs", "run"), ("runs", "run", "notes.txt")])
def test_a_run_that_fails_before_it_begins_leaves_nothing(tiny, tmp_path, there):
    path = tmp_path
    for name in there:
        path = path / name
        path.touch() if "." in name else path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), open_run(tiny(run=tmp_path / "runs" / "run")):
        raise KeyboardInterrupt
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_locked_by_one_process(tiny):
    config = tiny()
    with open_run(config):
        pass
    code = """if True:
        import signal, sys
        from tfla.train.config import TrainConfig, from_json
        from tfla.train.run_folder import open_run
        with open_run(from_json(TrainConfig, sys.argv[1])):
            print("opened", flush=True)
            signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", code, to_json(config)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "opened\n"
            with pytest.raises(UserError, match="another process is training there"):
                open_run(config).__enter__()
        finally:
            other.kill()
    with open_run(config) as run:  # the lock went with the process
        assert run.is_dir()


def test_temporary_files_of_killed_processes_are_deleted(tiny):
    with open_run(tiny()) as run:
        write_run_config(None, tiny())
        (run / ".tmp-tokens-1").mkdir()
        (run / ".config.json.1.tmp").touch()
    with open_run(tiny()):
        assert {path.name for path in run.iterdir()} == {"config.json", "lock"}


def test_a_run_that_cannot_be_written_is_named(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/run: Not a directory"):
        open_run(tiny(run=tmp_path / "file" / "run")).__enter__()
