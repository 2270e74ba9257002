"""The commands of training, from their options to their exit codes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

import tfla
from tfla.cli import COMMANDS, main
from tfla.train import loop
from tfla.train.config import to_json
from tfla.train.logging import METRICS_FILE, read_metrics
from tfla.train.run_folder import read_run_config

OPTIONS = {
    "model.d-model": 32, "model.num-blocks": 1, "model.num-heads": 2, "batch-size": 4, "context": 24,
    "optim.warmup-steps": 2, "optim.cooldown-steps": 2, "eval-every": 5, "eval-windows": 4, "checkpoint-every": 2,
    "device": "cpu", "threads": 1,
}  # fmt: skip
TINY = [f"--{name}={value}" for name, value in OPTIONS.items()]


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert tfla.__version__ in capsys.readouterr().out
    assert main(["brew"]) == 2
    assert "there is no command 'brew'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "generate", "demo"])
def test_every_command_lists_its_options(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: tfla {command}" in capsys.readouterr().out


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "tfla.train.commands", raising=False)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == 'tfla: error: tyro is not installed: pip install "tfla[train]"\n'


def test_help_imports_no_command():
    code = "import sys; from tfla.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tyro", "tfla.train", "tfla.nn"} & set(done.stdout.split())


def test_train_says_what_is_missing(tmp_path, capsys):
    assert main(["train", "--run", str(tmp_path / "run"), "--data.paths", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"tfla: error: {tmp_path / 'none'}: no such file or folder\n"
    assert main(["train", "--run", str(tmp_path / "other")]) == 1
    assert "data.paths: expected text files or folders" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_options(texts, tmp_path, capsys):
    run = ["train", "--run", str(tmp_path / "run")]
    assert main([*run, "--data.paths", str(texts), *TINY, "--steps", "4", "--no-tensorboard"]) == 0
    out = capsys.readouterr().out
    last = read_metrics(tmp_path / "run")[-1]
    assert f"perplexity {last['perplexity']:.3f}, {last['bits_per_byte']:.4f} bits per byte" in out
    assert str(tmp_path / "run") in out
    config = read_run_config(tmp_path / "run")
    assert (config.steps, config.model.d_model, config.tensorboard) == (4, 32, False)
    assert main(run) == 0  # nothing left to do
    assert read_run_config(tmp_path / "run") == config
    (tmp_path / "run").rename(tmp_path / "moved")
    run = ["train", f"--run={tmp_path / 'moved'}"]
    assert main(run) == 0
    (tmp_path / "moved").rename(tmp_path / "run")
    run = ["train", "--run", str(tmp_path / "run")]
    assert main([*run, "--seed", "1"]) == 1
    assert "this run's seed is 0, not 1" in capsys.readouterr().err
    (tmp_path / "run" / "config.json").write_text(to_json(config)[:-9])
    assert main(run) == 1
    assert "config.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_so_and_fails(texts, tmp_path, monkeypatch, capsys, number, code):
    real, calls = loop.token_losses, []

    def ask(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    run = [
        "train",
        "--run",
        str(tmp_path / "run"),
        "--data.paths",
        str(texts),
        *TINY,
        "--steps",
        "4",
        "--no-tensorboard",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "token_losses", ask)
        assert main(run) == code
    out, err = capsys.readouterr()
    assert out == ""  # nothing that was measured before the last step
    assert "stopped at step 3 of 4, which is saved; the same command continues from there" in err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name[-1] == "3"] == [
        "step-00000003"
    ]
    assert main(run) == 0
    assert capsys.readouterr().out.startswith("step 4, held out: loss ")


# The command after the first three arguments. A thread of the process itself kills it, as the kernel would for another
# process: one that watched from outside could sleep on a busy machine until the run has ended.
KILLED = """if True:
    import os, signal, sys, threading, time
    from pathlib import Path
    from tfla.cli import main

    path, records, moment = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

    def count():
        return path.read_bytes().count(b"\\n") if path.exists() else 0

    def kill(until=count() + records):
        while count() < until:
            time.sleep(0.001)
        time.sleep(moment)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    sys.exit(main(sys.argv[4:]))
"""


def test_a_killed_run_goes_on_bit_for_bit(texts, tmp_path):
    """A run killed by SIGKILL at random moments and started again must equal an undisturbed run."""

    def start(run: str, *command: str) -> subprocess.Popen:
        args = ["train", "--run", str(tmp_path / run), "--data.paths", str(texts), "--steps", "120", *TINY]
        return subprocess.Popen(
            [sys.executable, *(command or ("-m", "tfla.cli")), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    metrics = tmp_path / "killed" / METRICS_FILE
    whole = start("whole")
    draw = random.Random()
    seed = draw.randrange(10**6)
    draw.seed(seed)
    for part in range(4):
        # After so many more records, and then a moment that may fall anywhere in a step or a checkpoint.
        records = draw.randrange(1, 25) if part else 1
        process = start("killed", "-c", KILLED, str(metrics), str(records), str(draw.uniform(0, 0.03)))
        output = process.communicate()[0].decode()
        assert process.returncode == -signal.SIGKILL, output
    last = start("killed")
    output = last.communicate()[0].decode()
    assert last.returncode == 0, output
    assert whole.wait() == 0
    same = [
        [(r["kind"], r["step"], r["loss"], r.get("grad_norm")) for r in read_metrics(tmp_path / run)]
        for run in ("whole", "killed")
    ]
    assert same[0] == same[1], f"seed {seed}"
    assert len(same[0]) == 120 + 25
    assert "continues after step" in output
