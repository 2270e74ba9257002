"""The marks, the bounds of errors and the fixture that tests of the Triton kernels of layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tfla.backends.gpu.runtime import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # half a unit in the last place, and more
RUNS = [
    pytest.mark.gpu,
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"),
]


@pytest.fixture(scope="module", autouse=True)
def bfloat16() -> Iterator[None]:
    """Let Triton's interpreter compute with bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            from interpreted_bfloat16 import use_bfloat16

            use_bfloat16(patch)
        yield


def check(found: Tensor, truth: Tensor, tolerance: float) -> None:
    """Check the shape and the relative error of a result."""
    assert found.shape == truth.shape
    error = (found.detach().double() - truth.detach()).norm()
    assert error <= tolerance * truth.detach().norm(), error
