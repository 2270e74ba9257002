"""Runs of hybrid models by the command: training, a run that continues, documents separated in both ways, and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla.cli import main
from tfla.nn import LanguageModel

# Every mixer but the exponential mLSTM, the default of all other tests of training.
MIXTURES = [["gated_delta_net", "mamba2", "retnet", "attention"], ["gla", "kda", "mlstm_sig", "delta_net"]]


@pytest.mark.parametrize("reset", ["gate", "cu_seqlens"])
@pytest.mark.parametrize("layers", MIXTURES, ids=lambda layers: layers[0])
def test_a_hybrid_is_trained_and_writes_text(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: list[str], reset: str
) -> None:
    run = str(tmp_path / "run")
    own = ["--model.mamba-head-dim", "16", "--model.mamba-state-dim", "8"] if "mamba2" in layers else []
    own += ["--model.window", "16"] if "attention" in layers else []
    args = [
        "train", "--run", run, "--data.paths", str(texts), "--data.heldout", "0.2", "--model.d-model", "32",
        "--model.num-blocks", "4", "--model.num-heads", "2", "--model.layers", *layers, *own, "--batch-size", "4",
        "--context", "24", "--eval-every", "20", "--checkpoint-every", "10", "--no-tensorboard", "--device", "cpu",
        "--optim.lr", "1e-2", "--reset", reset,
    ]  # fmt: skip
    assert main([*args, "--steps", "10"]) == 0
    assert main([*args, "--steps", "20"]) == 0
    losses = [row["loss"] for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    capsys.readouterr()
    assert main(["generate", "--checkpoint", run, "--prompt", "gate ", "--max-new-tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("gate ")
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    assert LanguageModel.from_pretrained(checkpoint).config.block_mixers == tuple(layers)
