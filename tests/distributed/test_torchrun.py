"""``torchrun -m tfla train``: a killed process ends the others soon, and the same command continues the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_ports
from processes import start as start_processes
from torch.distributed.run import get_args_parser
from training_runs import set_rank

from tfla.cli import main
from tfla.train.checkpoint import latest_checkpoint
from tfla.train.config import TrainConfig
from tfla.train.logging import read_metrics

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SIZES = [
    "--data.heldout", "0.2", "--model.d-model", "32", "--model.num-blocks", "1", "--model.num-heads", "2",
    "--optim.warmup-steps", "2", "--optim.cooldown-steps", "2", "--steps", "60", "--batch-size", "4",
    "--context", "24", "--eval-every", "20", "--checkpoint-every", "5", "--no-tensorboard", "--device", "cpu",
    "--threads", "1",
]  # fmt: skip


def arguments(folder: Path, name: str) -> list[str]:
    """Return those of a run in a folder that has the texts."""
    return ["train", "--run-folder", str(folder / name), "--data.paths", str(folder / "texts"), *SIZES]


def _train(rank: int, port: int, command: list[str]) -> None:
    """Train as one of two processes without torchrun, which imports everything anew."""
    set_rank(rank, 2, port)
    assert main(command) == 0


def start(folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    """Start a run of two processes."""
    return subprocess.Popen(
        [*TORCHRUN, *options, "-m", "tfla", *arguments(folder, name)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_torchrun_takes_no_other_option_for_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """An option of a script that abbreviates several options of torchrun ends it (pytorch#120601)."""
    tyro = pytest.importorskip("tyro")
    parser, taken = get_args_parser(), []
    with pytest.raises(SystemExit):
        tyro.cli(TrainConfig, args=["--help"], default=TrainConfig())
    words = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert len(words) > 60
    for word in sorted(words - {"--help"}):
        with contextlib.suppress(SystemExit):
            taken.append(word)
            parsed = parser.parse_args(["-m", "tfla", "train", word, "1"])
            assert parsed.training_script_args == ["train", word, "1"]
            taken.pop()
    assert set(taken) <= {"--run"}  # Python 3.11 reports abbreviations of several options wherever they stand
    assert parser.parse_args(["-m", "--", "tfla", "train", "--run", "1"]).training_script_args[-2:] == ["--run", "1"]


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a run has recorded a step."""
    while not any(r["kind"] == "train" and r["step"] >= step for r in read_metrics(run)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def kill_rank(process: subprocess.Popen[str], rank: int) -> None:
    """Kill one of the processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            os.kill(int(child), signal.SIGKILL)
            return
    pytest.fail(f"no process with rank {rank} among {children}")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_killed_process_ends_the_run_and_the_same_command_continues_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(f"gate state tile {number} head norm " * 8)
    start_processes(2, _train, *free_ports(1), arguments(tmp_path, "whole"))

    # Without restarts: process 0 says within a minute that process 1 is gone.
    run = tmp_path / "killed"
    killed = start(tmp_path, "killed")
    wait_for_step(killed, run, 12)
    while latest_checkpoint(run / "checkpoints") is None:  # a thread writes it while training goes on
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    kill_rank(killed, 1)
    began = time.monotonic()
    output = killed.communicate(timeout=60)[0]
    assert time.monotonic() - began < 60
    assert killed.returncode != 0
    assert len(re.findall(r"(?<!\d)0/60", output)) == 1  # one progress bar
    assert "tfla: error: process 0 stops, because process 1 has failed: it has died" in output, output
    latest = latest_checkpoint(run / "checkpoints")
    assert latest is not None
    step = json.loads((latest / "manifest.json").read_text())["step"]
    assert latest.name == f"step-{step:08d}"
    assert f"; the last good checkpoint is {latest}; start again" in output, output

    # The same command continues; when process 0 is killed too, torchrun's own restart does.
    reached = max(r["step"] for r in read_metrics(run))
    again = start(tmp_path, "killed", "--max-restarts", "1")
    wait_for_step(again, run, reached + 6)
    kill_rank(again, 0)
    output = again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    assert output.count("continues after step") == 2, output
    assert "60/60" in output
    same = [
        [(r["kind"], r["step"], r["loss"], r.get("grad_norm")) for r in read_metrics(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert same[0] == same[1]
    assert len(same[0]) == 60 + 4
