"""The wheel and the source distribution: what an installation without a checkout has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

builders = pytest.importorskip("hatchling.builders.wheel")
sdist = pytest.importorskip("hatchling.builders.sdist")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
(VERSION,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


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
    for name in ("ops/chunk_sizes.json", "__main__.py", "py.typed"):
        assert (installed / "tfla" / name).is_file(), name


@pytest.mark.parametrize("version", [VERSION, "9.8.7"])
def test_the_version_is_that_of_the_metadata(installed: Path, tmp_path: Path, version: str) -> None:
    code = f"import tfla; assert tfla.__file__.startswith({str(installed)!r}); print(tfla.__version__)"
    (metadata,) = installed.glob("tfla-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert f"\nVersion: {VERSION}\n" in text
    metadata.write_text(text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {version}\n"), encoding="utf-8")
    try:
        done = python(installed, tmp_path, "-c", code)
    finally:
        metadata.write_text(text, encoding="utf-8")
    assert done.stdout == f"{version}\n", done.stderr


def test_sources_that_are_not_installed_have_a_version(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, torch\n"
        "def version(name, found=m.version):\n"
        "    if name == 'tfla': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "import tfla; print(tfla.__version__)"
    )
    done = python(ROOT / "src", tmp_path, "-c", code)
    assert done.stdout == "0+source\n", done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and return its path."""
    folder = tmp_path_factory.mktemp("sdist")
    (path,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_the_source_distribution_has_what_a_checkout_has(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"benchmarks", "docs", "examples", "src", "tests"}  # nothing that lies in a checkout by chance
    for name in (
        "src/tfla/__init__.py", "src/tfla/py.typed", "tests/cases.py", "tests/conftest.py", "docs/index.md",
        "examples/serve.py", "benchmarks/results/fig4.json", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
        "Makefile", "constraints.txt", "mkdocs.yml", "pyproject.toml", "PKG-INFO",
    ):  # fmt: skip
        assert name in names, name


def test_the_source_distribution_installs_without_a_network(archive: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(site)]
    done = python(tmp_path, tmp_path, "-m", "pip", "install", *options, str(archive))
    assert done.returncode == 0, done.stderr
    code = (
        "import torch, tfla; print(tfla.__file__, tfla.__version__)\n"
        "x = torch.ones(1, 3, 2, 4); print(tuple(tfla.mlstm(x, x, x, x[..., 0], x[..., 0]).shape))"
    )
    done = python(site, tmp_path, "-c", code)
    assert done.stdout == f"{site}/tfla/__init__.py {VERSION}\n(1, 3, 2, 4)\n", done.stderr
