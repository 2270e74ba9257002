"""The implementations of decoding steps in tests: the reference and the kernels, on every device where they run."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from cases import DEVICES, INTERPRETED

from tfla.backends import BACKENDS, DELTA_BACKENDS, StepInputs
from tfla.backends.delta import DeltaStepInputs


class Stepper(NamedTuple):
    """Whose steps, and where."""

    backend: str
    device: str

    def check_takes(
        self, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, *, delta_rule: bool = False
    ) -> None:
        """Skips the test where the backend has no kernel for these dtypes."""
        x = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.device)
        gate, C = x[..., 0], x[:, 0, :, :, None].to(state_dtype)
        if delta_rule:
            given = DeltaStepInputs(x, x, x, None, gate, None, None, None, C, None)
            why = DELTA_BACKENDS[self.backend].steps_unsupported(given)
        else:
            why = BACKENDS[self.backend].steps_unsupported(StepInputs(x, x, x, gate, gate, C, None, None, None))
        if why is not None and self.backend != "reference":
            pytest.skip(why)


def steppers() -> list[Any]:
    """The reference and the kernels, on every device where they run."""
    found = []
    for backend, device in itertools.product(("reference", "triton"), DEVICES):
        if backend == "reference" and INTERPRETED:
            continue
        if backend == "triton" and device == "cpu" and not INTERPRETED:
            continue
        found.append(
            pytest.param(
                Stepper(backend, device), id=f"{backend}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else []
            )
        )
    return found
