"""The command as a process: output that nothing reads, and unknown words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfla
from tfla.cli import main

TFLA = [sys.executable, "-m", "tfla"]


def test_the_package_is_the_command() -> None:
    done = subprocess.run([*TFLA, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tfla {tfla.__version__}\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX")
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["bench", "--help"], ["tune", "--help"]])
def test_a_reader_that_has_gone_is_no_error(args: list[str]) -> None:
    """`tfla --help | head -1` closes the output early where head is faster."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run([*TFLA, *args], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TFLA, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "tfla: error: No space left on device\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["analyze", "nosuch"], "tfla analyze: error: there is no section 'nosuch'\n\nusage: tfla analyze "),
        (
            ["experiment", "nosuch"],
            "tfla experiment: error: there is no experiment 'nosuch'\n\nusage: tfla experiment ",
        ),
        (["bench", "nosuch"], "tfla bench: error: there is no benchmark 'nosuch'\n\nusage: tfla bench "),
        (["support", "nosuch"], "tfla support: error: got 'nosuch', expected no argument\n"),
        (["nosuch"], "tfla: error: there is no command 'nosuch'\n\nusage: tfla "),
    ],
)
def test_the_wrong_word_is_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)


@pytest.mark.parametrize("command", ["analyze", "experiment", "bench"])
def test_a_missing_word_shows_the_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert capsys.readouterr().err.startswith(f"usage: tfla {command}")
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: tfla {command}")
