"""The models of the suite "train", small and on the CPU."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing

from tfla.bench.models import random_model
from tfla.bench.suites import SUITES
from tfla.bench.training import step
from tfla.measure.problem import STEP, Problem, call_of
from tfla.nn import LanguageModel, ModelConfig

SMALL = {"attention": "MATH", "blocks": 3, "vocab": 30}


def problem_of(mixer: str) -> Problem:
    return Problem(2, 48, 2, 16 if mixer == "attention" else 8, 16, dtype="float32", device="cpu")


@pytest.mark.parametrize("mixer", ["mlstm_sig", "mlstm_exp", "attention"])
def test_a_step_learns_and_compiles_once_for_all_blocks(mixer):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    losses = []
    for compiler in (None, counter):
        torch.manual_seed(0)
        work = step(problem_of(mixer), mixer, compiler=compiler, **SMALL)
        call = call_of(work, STEP)
        assert call() is None
        losses.append([call() for _ in range(3)])
        assert work.facts["operator_seconds"] > 0
        assert ("implementation" in work.facts) == (mixer != "attention")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(torch.tensor(30.0).log().item(), rel=0.2)
    assert losses[0] == sorted(losses[0], reverse=True)
    assert counter.frame_count == 2  # a block and the losses


def test_a_loss_that_is_not_finite_is_no_result(monkeypatch):
    monkeypatch.setattr(LanguageModel, "losses", lambda self, ids, targets, recompute: self(ids) * torch.nan)
    work = step(problem_of("mlstm_sig"), "mlstm_sig", **SMALL)
    call = call_of(work, STEP)
    call()
    with pytest.raises(RuntimeError, match="loss nan, gradient norm nan"):
        call()


def test_the_suites_models_are_those_of_table_4():
    suite = SUITES["train"]
    for entry in suite.entries:
        problem, mixer = suite.problem(entry, 2, "meta"), entry.options["mixer"]
        config = random_model(problem, mixer, blocks=24, vocab=50_257).config
        assert replace(config, qk_factor=0.5) == ModelConfig.named("1.4B", problem.H, mixer)
        assert (problem.B, problem.T) == (2, 8192)
