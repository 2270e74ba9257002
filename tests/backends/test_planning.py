"""Plans of launches are made for the GPU that is named, and leave Triton's driver as it was."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.driver import driver

from tfla.backends import BACKENDS, Inputs
from tfla.backends.gpu import config, planning
from tfla.backends.gpu.replay import fill_with_ones
from tfla.backends.gpu.runtime import PlannedGPU, planned_gpu


def inputs(T: int, dtype: torch.dtype) -> Inputs:
    q, gate = planning.like((1, T, 2, 128), dtype), planning.like((1, T, 2), torch.float32)
    return Inputs(q, q, q, gate, gate, None, None, None, None)


def test_a_planned_gpu_decides_as_one_that_is_there() -> None:
    before = vars(driver).get("_active")
    x, precise = inputs(8192, torch.bfloat16), inputs(64, torch.float32)
    for architecture, processors in ((90, 132), (80, 108)):
        with planning.planning(PlannedGPU(architecture, processors, "tf32x3")):
            assert config.architecture(x.q.device) == architecture
            assert config.processors(x.q.device) == processors
            assert (config.products(x), config.products(precise)) == ("tf32", "tf32x3")
            refused = BACKENDS["hopper"].unsupported(x)
            assert (refused is None) == (architecture == 90)
            assert BACKENDS["triton"].unsupported(x) is None
            # Two heads leave most multiprocessors idle, so that the sequence is cut.
            assert BACKENDS["triton"].default_chunk_size(x, "fused") < 8192
    assert planned_gpu(x.q.device) is None
    assert vars(driver).get("_active") is before


def test_operations_of_pytorch_are_refused() -> None:
    """A plan has no operation that another host would not know."""
    x = inputs(64, torch.float32)
    with planning.planning(PlannedGPU(80, 108, "ieee")):
        recorder = planning.PlanRecorder(x)
        zeros = recorder.do(torch.Tensor.zero_, recorder.new(3))
        assert recorder.do(torch.Tensor.copy_, recorder.new(3), zeros).shape == (3,)
        ones = recorder.do(fill_with_ones, recorder.new(3))
        view = recorder.do(lambda t: t.expand(2, 3), ones)
        assert recorder.numbers[id(view)] == recorder.numbers[id(ones)]
        with pytest.raises(NotImplementedError, match="an operation of PyTorch"):
            recorder.do(lambda t: t.sum(0), zeros)
    plan = recorder.finish([zeros, ones])
    assert [type(step).__name__ for step in plan.steps] == ["Allocate", "Fill", "Allocate", "Copy", "Allocate", "Fill"]
    assert [step.value for step in plan.steps if isinstance(step, planning.Fill)] == [0.0, 1.0]
    assert plan.results == (len(x), len(x) + 2)
