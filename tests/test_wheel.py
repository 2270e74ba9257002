"""The wheel: what an installation without a checkout has."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

builders = pytest.importorskip("hatchling.builders.wheel")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    assert Path(wheel).stat().st_size < 4 * 2**20
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def python(installed: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with that installation of the package, which has to be the one that is imported."""
    env = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True)


def test_stored_results_are_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import tfla; from tfla.bench.results import default_folder; print(tfla.__file__); print(default_folder())"
    done = python(installed, tmp_path, "-c", code)
    file, folder = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert Path(folder).is_relative_to(installed)
    there = {path.name: path.read_bytes() for path in Path(folder).glob("*.json")}
    assert there == {path.name: path.read_bytes() for path in RESULTS.glob("*.json")}
    assert len(there) > 30


def test_figures_are_drawn_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-m", "tfla", "analyze", "training", "--out", "figures")
    assert done.returncode == 0, done.stderr
    assert "not drawn" not in done.stdout + done.stderr
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5


def test_without_results_it_is_said(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-m", "tfla", "analyze", "training", "--results", ".")
    assert done.returncode == 1
    assert "not drawn: Tables 2, 3, 5, 6 and Figures 8 to 11: no ./training.json" in done.stderr
    done = python(installed, tmp_path, "-m", "tfla", "analyze", "all", "--results", "nowhere")
    assert (done.returncode, done.stderr) == (
        1, "tfla: error: results: got 'nowhere', expected a folder of JSON files of `tfla bench`\n"
    )  # fmt: skip


def test_the_shipped_table_and_the_command_are_in_the_wheel(installed: Path) -> None:
    for name in ("ops/chunk_sizes.json", "__main__.py"):
        assert (installed / "tfla" / name).is_file(), name
