"""The models of the suite "transformers", small and on the CPU."""

import pytest
import torch
from plain_transformers import transformers

from tfla.bench.suites import SUITES
from tfla.measure.problem import BOTH, FORWARD, Problem, call_of

SMALL = Problem(2, 64, 2, 32, 64, dtype="float32", device="cpu")


@pytest.mark.parametrize("cell", ["tfla", "transformers", "mlstm_kernels"])
def test_a_prefill_and_a_training_step(cell):
    from tfla.bench.xlstm_models import model

    options = {}
    if cell == "mlstm_kernels":
        pytest.importorskip("mlstm_kernels")
        options = {"kernel": "chunkwise--native_autograd", "chunk_size": 64}
    work = model(SMALL, cell, blocks=1, vocab_size=30, **options)
    assert call_of(work, FORWARD)().shape == (2, 64, 30)
    gradients = call_of(work, BOTH)()
    assert [g.shape for g in gradients] == [p.shape for p in work.inputs]
    assert all(g.isfinite().all() for g in gradients)


def test_the_suites_model_has_a_billion_parameters():
    problem = SUITES["transformers"].at(2048)
    width = problem.H * problem.dhv
    with torch.device("meta"):
        built = transformers.xLSTMForCausalLM(
            transformers.xLSTMConfig(hidden_size=width, num_hidden_layers=18, num_blocks=18, num_heads=8)
        )
    assert 1.0e9 < sum(p.numel() for p in built.parameters()) < 1.2e9
