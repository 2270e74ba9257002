"""The pages in docs/: their examples run, and the table of what is supported where is that of the code."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path

import pytest

from tfla.cli import main
from tfla.integrations import fla
from tfla.integrations.fla.replacement import MODULES
from tfla.support_table import page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["quickstart", "mlstm_kernels", "fla", "mamba", "models", "xlstm"])
def test_examples_run(name: str) -> None:
    if name == "xlstm":
        pytest.importorskip("xlstm", reason='pip install "tfla[baselines]"')
    path = DOCS / f"{name}.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    exec(compile("\n".join(blocks), str(path), "exec"), {})


@pytest.mark.parametrize("name", ["mlstm_kernels", "fla", "mamba"])
def test_imports_of_the_diff_exist(name: str) -> None:
    (diff,) = re.findall(
        r"^```diff\n(.*?)^```$", (DOCS / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec("\n".join(line[1:] for line in diff.splitlines() if line.startswith("+")), {})


def test_fla_page_lists_every_function() -> None:
    text = (DOCS / "fla.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(.*)$", text, re.MULTILINE)
    listed = {module: re.findall(r"`(\w+)`", row) for module, row in rows if module in MODULES}
    for module in MODULES:
        assert sorted(listed[module]) == sorted(importlib.import_module(f"tfla.integrations.fla.{module}").__all__)
    assert sorted(itertools.chain(*listed.values())) == sorted({*fla.__all__} - {"patch", "restore"})


def test_support_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """`tfla support > docs/support.md` writes it."""
    pytest.importorskip("triton")
    assert main(["support"]) == 0
    printed = capsys.readouterr().out
    assert printed == page() + "\n"
    assert (DOCS / "support.md").read_text(encoding="utf-8") == printed


def test_support_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "--help"]) == 0
    assert main(["support", "everything"]) == 2
    assert "usage: tfla support" in capsys.readouterr().out
