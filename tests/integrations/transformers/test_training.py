"""The tests with transformers' Trainer, of the example that uses it, and of the page in docs/."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from plain_transformers import transformers
from torch import Tensor

from tfla.integrations.transformers import accelerate

pytest.importorskip("accelerate")
Make = Callable[..., Any]
Tokens = Callable[..., Tensor]
ROOT = Path(__file__).parents[3]


def train(model: Any, data: list[dict[str, Tensor]], out: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), max_steps=3, per_device_train_batch_size=2, optim="sgd", learning_rate=0.1, report_to="none",
        use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model.train(), arguments, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}])
def test_trainer_ends_where_the_library_ends(
    make_xlstm: Make, tokens: Tokens, tmp_path: Path, options: dict[str, Any]
) -> None:
    data = [{"input_ids": row, "labels": row} for row in tokens(12, 32)]
    before = make_xlstm().state_dict()
    library = train(make_xlstm(), data, tmp_path / "library", **options).model
    model = train(accelerate(make_xlstm()), data, tmp_path / "tfla", **options).model
    expected = dict(library.named_parameters())
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
        assert error(p, expected[name]) <= TOLERANCE[torch.float32], name
    loaded = transformers.xLSTMForCausalLM.from_pretrained(tmp_path / "tfla")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.named_parameters())


def test_the_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    for n in range(3):
        (tmp_path / "text" / f"{n}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    sizes = {"hidden-size": 128, "blocks": 1, "heads": 2, "length": 64, "batch": 4, "steps": 20, "learning-rate": 5e-3}
    paths = {"text": tmp_path / "text", "glob": "*.txt", "out": tmp_path / "run", "prompt": "the quick"}
    words = [str(word) for name, value in (sizes | paths).items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["train_xlstm_trainer.py", *words])
    runpy.run_path(str(ROOT / "examples" / "train_xlstm_trainer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    first, last = map(float, re.search(r"byte: (\S+) at first, (\S+) at last", printed).groups())  # type: ignore[union-attr]
    assert last < first - 3
    assert "the quick" in printed
    assert transformers.xLSTMForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size == 128


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "docs/transformers.md", "exec"), names)
    assert names["text"].shape == (2, 24)
    with torch.no_grad():
        ids = names["ids"]
        assert error(names["again"](ids).logits, names["own"](ids)) <= TOLERANCE[torch.float32] * 5
