"""The examples of docs/jax.md run as they are printed there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def test_examples_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


def test_imports_of_the_diff_exist() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec("\n".join(line[1:] for line in diff.splitlines() if line.startswith("+")), {})
