"""The test of lm-evaluation-harness with an exported model and a task made here, as docs/transformers.md runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import error
from small_tfla import SIZES

from tfla.integrations.transformers.export import export
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.documents import Document
from tfla.train.tokenizer import ByteTokenizer

lm_eval = pytest.importorskip("lm_eval")
TASK = """task: next_numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


@torch.no_grad()
def log_likelihood(model: LanguageModel, question: str, choice: str) -> float:
    (ids,) = ByteTokenizer().encode([Document("text", f"{question} {choice}".encode())])
    tokens = torch.from_numpy(ids)[None]
    return -float(model.losses(tokens[:, :-1], tokens[:, 1:])[0, len(question) :].sum())


def test_log_likelihoods_are_those_of_the_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model = LanguageModel(
        ModelConfig.from_dict(SIZES | {"vocab_size": 257, "num_blocks": 2, "layers": ("kda", "attention")})
    )
    model.save_pretrained(tmp_path / "own")
    ByteTokenizer().save(tmp_path / "own")
    export(tmp_path / "own", tmp_path / "hf")
    rows = [{"question": f"{n} + 1 =", "choices": [str(n + 1), str(10 * n)], "answer": 0} for n in range(5, 13)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "next_numbers.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    arguments = f"pretrained={tmp_path / 'hf'},trust_remote_code=True,add_bos_token=True,dtype=float32"
    found = lm_eval.simple_evaluate(
        "hf", model_args=arguments, tasks=["next_numbers"], device="cpu", batch_size=3, log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path / "task")),
    )  # fmt: skip
    expected = [[log_likelihood(model, row["question"], choice) for choice in row["choices"]] for row in rows]
    samples = sorted(found["samples"]["next_numbers"], key=lambda sample: sample["doc_id"])
    given = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    assert error(torch.tensor(given), torch.tensor(expected)) <= 1e-5
    right = sum(a > b for a, b in expected) / len(expected)
    assert found["results"]["next_numbers"]["acc,none"] == pytest.approx(right)
