"""The example that trains a model over a mesh: it learns, its weights are divided, and PyTorch loads the result."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import tfla.nn

SCRIPT = Path(__file__).parents[2] / "examples" / "jax_train.py"

# Prints the loss of the model before training and after each step, and how the weights and the moments are divided.
CODE = """
import importlib.util, sys, jax
from flax import nnx
spec = importlib.util.spec_from_file_location("jax_train", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
model, losses = example.main(sys.argv[2:])
kernel = model.blocks[0].ffn.up_proj.kernel[...]
print("devices", jax.device_count(), "shards", {s.data.shape for s in kernel.addressable_shards}, kernel.shape)
print("losses", *losses)
"""


def test_a_model_is_trained_on_two_devices(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("bisect", "heapq", "keyword"):
        module = importlib.util.find_spec(name)
        (tmp_path / "text" / f"{name}.py").write_bytes(Path(module.origin).read_bytes())
    options = [
        "--steps", "12", "--batch", "4", "--context", "32", "--d-model", "32",
        "--corpus", str(tmp_path / "text"), "--out", str(tmp_path / "model"),
    ]  # fmt: skip
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(SCRIPT), *options], capture_output=True, text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2] == "devices 2 shards {(32, 64)} (32, 128)"
    losses = [float(x) for x in lines[-1].split()[1:]]
    assert len(losses) == 12
    assert abs(losses[0] - np.log2(257)) < 0.6  # random logits of variance 0.4 cost 0.3 bits
    assert losses[-1] < losses[0] - 1.0
    model = tfla.nn.LanguageModel.from_pretrained(tmp_path / "model")
    ids = torch.frombuffer(bytearray((tmp_path / "text" / "heapq.py").read_bytes()[:400]), dtype=torch.uint8).long()
    logits = model(ids[None])
    bits = torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:]).item() / np.log(2)
    assert bits < losses[0] - 1.0
