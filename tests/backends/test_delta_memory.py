"""The most memory of forward and backward of the delta rule on a Hopper GPU, by count: no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tfla.backends.hopper.delta_backward", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("peak_memory.py")
BAR = 1.5  # of the output and the gradients
SHAPES = ("gdn 16 128 128", "gdn 16 128 256", "gdn 32 128 128", "kda 32 128 128", "gla 8 256 512")


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), environment.get("PYTHONPATH", "")])
    answer = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, dict[str, int]] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_peak_beside_results(shape: str, counted: dict[str, dict[str, int]]) -> None:
    assert 1.0 < counted[shape]["peak"] / counted[shape]["results"] <= BAR
