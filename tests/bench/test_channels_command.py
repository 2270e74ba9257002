"""The command that times kernels of gates by channel explains itself and names wrong options, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "channels.py"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--help"], 0, ["FOLDER", "--models", "--steps", "--tokens", "--repeats", "--out"]),
        (["--steps", "0"], 2, ["--steps: got 0, expected at least 1"]),
        (["--steps", "3", "--tokens", "7"], 2, ["--tokens: got 7, expected a multiple of --steps, 3"]),
        (["--models", "mamba"], 2, ["--models", "'mamba'", "gla"]),
    ],
    ids=str,
)
def test_its_options(options: list[str], code: int, words: list[str]) -> None:
    found = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=60)
    text = found.stdout + found.stderr
    assert found.returncode == code
    assert all(word in text for word in words), text
    assert f"{SCRIPT.parents[1]}, " not in text  # nothing has been run
