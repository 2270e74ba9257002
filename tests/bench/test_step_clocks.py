"""The command that measures the clocks of steps marks kernels and names wrong options, without a GPU."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_clocks.py"
SPEC = importlib.util.spec_from_file_location("step_clocks", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
step_clocks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step_clocks)
FOLDER = step_clocks.HERE / step_clocks.HOPPER


@pytest.mark.parametrize(
    "module", ["channel_gradients", "channel_h", "channel_dv", "delta_h", "delta_dv_dk", "delta_dq_dk", "o_dv", "dq_dk"]
)
def test_it_marks_the_steps(module: str) -> None:
    source = (FOLDER / f"{module}.py").read_text()
    marked, names = step_clocks.with_marks(source)
    assert (names[0], names[-1]) == ("start", "end")
    assert sum(name.startswith("(") for name in names) >= 2
    assert 5 <= len(names) <= step_clocks.MARKS
    functions = {f.name: f for f in ast.parse(marked).body if isinstance(f, ast.FunctionDef)}
    calls = [n for n in ast.walk(functions["process_tile"]) if isinstance(n, ast.Call)]
    marks = [n.args[0].value for n in calls if isinstance(n.func, ast.Name) and n.func.id == "_mark"]  # type: ignore
    assert sorted(marks) == list(range(len(names)))
    assert not set(source.splitlines()) - set(marked.splitlines())


def test_it_names_what_it_cannot_mark() -> None:
    with pytest.raises(ValueError, match="expected a function process_tile"):
        step_clocks.with_marks((FOLDER / "delta_solve.py").read_text())


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--help"], 0, ["MODULE", "--model", "--steps", "--batch", "--heads", "--dqk", "--dhv"]),
        (["channel_dv", "--steps", "0"], 2, ["--steps: got 0, expected at least 1"]),
        (["nothing"], 2, ["MODULE: got 'nothing', expected a module of src/tfla/backends/hopper"]),
        (["delta_solve"], 1, ["MODULE: got 'delta_solve': expected a function process_tile"]),
    ],
    ids=str,
)
def test_its_options(options: list[str], code: int, words: list[str]) -> None:
    found = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=60)
    assert found.returncode == code
    assert all(word in found.stdout + found.stderr for word in words), found.stdout + found.stderr
