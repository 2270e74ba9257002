"""The benchmark of models of transformers calls what it says, on a CPU with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from addresses import Addresses

from tfla.bench.suites import SUITES
from tfla.bench.worker import serve
from tfla.integrations.transformers.rebind import ReplacedForward
from tfla.measure.problem import BOTH, FORWARD, Problem

transformers = pytest.importorskip("transformers", reason='pip install "tfla[transformers]"')

from tfla.bench import recurrent_models, replay  # noqa: E402

COMMON = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
SMALL: dict[str, dict[str, Any]] = {
    "mamba2": {**COMMON, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8},
    "qwen3_next": {
        **COMMON, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    },
}  # fmt: skip
PROBLEM = {"B": 2, "T": 12, "H": 1, "dqk": 1, "dhv": 1, "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize("path", ["tfla", "pytorch"])
@pytest.mark.parametrize("call", ["model", "step"])
@pytest.mark.parametrize("name", recurrent_models.MODELS)
def test_each_is_timed(name: str, call: str, path: str) -> None:
    directions = [FORWARD, BOTH] if call == "model" else [FORWARD]
    rows: list[dict[str, Any]] = []
    job = {
        "kind": "time", "make": f"tfla.bench.recurrent_models:{call}", "directions": directions, "problem": PROBLEM,
        "options": {"name": name, "path": path, **SMALL[name]}, "only_compile": False, "sustained": False,
        "host": False, "sampling": {"repeats": 1, "warmup": 1, "pause": 0},
    }  # fmt: skip
    serve(job, rows.append)
    assert rows.pop() == {"done": True}
    assert [row["direction"] for row in rows] == directions
    assert all(row.get("seconds", 0) > 0 for row in rows), rows


def test_what_a_graph_reads_of_attention_outlives_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the keys and values that the cache had before the call that was captured."""
    layer, read = transformers.cache_utils.DynamicLayer, list[torch.Tensor]()
    update = layer.update

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        read[:] = [x for x in (self.keys, self.values) if x is not None]
        return update(self, *args, **kwargs)

    def capture_graph(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[Addresses, torch.Tensor]:
        call()
        result = call()
        graph = Addresses(read)
        assert len(read) == 2
        read.clear()
        return graph, result

    monkeypatch.setattr(layer, "update", observed)
    monkeypatch.setattr(replay, "capture_graph", capture_graph)
    name = "qwen3_next"
    work = recurrent_models.step(Problem(**PROBLEM), name, "tfla", graph=True, **SMALL[name])
    assert work.run(*work.inputs).shape == (2, 1, 40)


@pytest.mark.parametrize("call", ["model", "step"])
@pytest.mark.parametrize("name", recurrent_models.MODELS)
def test_paths_compute_the_same(name: str, call: str) -> None:
    outs = []
    for path in ("tfla", "pytorch"):
        torch.manual_seed(0)
        work = getattr(recurrent_models, call)(Problem(**PROBLEM), name, path, **SMALL[name])
        with torch.no_grad():
            outs.append(work.run(*work.inputs))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


def test_paths_are_what_they_are_called() -> None:
    own, tfla, pytorch = (
        recurrent_models.build(Problem(**PROBLEM), "mamba2", path, **SMALL["mamba2"]).backbone.layers[0].mixer
        for path in ("packages", "tfla", "pytorch")
    )
    assert "forward" not in vars(own)
    assert isinstance(tfla.forward, ReplacedForward)
    (forward,) = (c.cell_contents for c in pytorch.forward.__func__.__closure__ if callable(c.cell_contents))
    assert not hasattr(forward.__globals__["mamba2_chunk_scan"], "__wrapped__")


@pytest.mark.parametrize("name", ["transformers_models", "transformers_steps"])
def test_suites_have_each_model_on_each_path(name: str) -> None:
    entries = SUITES[name].entries
    assert {(e.options["name"], e.options["path"]) for e in entries} == {
        (model, path) for model in recurrent_models.MODELS for path in ("tfla", "packages", "pytorch")
    }
    assert all(e.group == e.options["name"] for e in entries)
