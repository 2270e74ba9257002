"""Tests that results stay the same where processes take turns on a GPU, which interrupts their kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROCESSES, SECONDS = 4, 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_interrupted_kernels_compute_the_same() -> None:
    command = [sys.executable, str(Path(__file__).parent / "repeat_calls.py"), str(SECONDS)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert int(out) == 0
