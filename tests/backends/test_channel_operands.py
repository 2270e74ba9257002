"""The Hopper kernels for operands of gates by channel, within the kernels of Triton, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import GATES_WITH_MEMORY, DeltaProblem, check_beside_rounding, check_beside_terms, delta_problem
from interpreted_bfloat16 import use_bfloat16
from test_hopper_delta import DEVICE, on_hopper
from torch import Tensor

from tfla.backends.delta import DeltaInputs

pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from gluon_simulator.hopper import on_cpu

    with on_cpu(), pytest.MonkeyPatch.context() as patch:
        use_bfloat16(patch)
        yield


def solve(p: DeltaProblem) -> dict[str, Tensor]:
    """The quantities of `truth`, by these kernels and Triton's."""
    from tfla.backends.hopper import delta_backend
    from tfla.backends.triton import delta
    from tfla.backends.triton.channel_rule import ChannelContext, ChannelKernels

    def operands(ctx: ChannelContext) -> ChannelKernels:
        found = delta_backend.channel_kernels(ctx)
        assert found.operands is not None
        return found._replace(gradients=None)

    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    spec = p.spec("fused")
    out = delta.run_forward(x, spec, delta.KERNELS._replace(by_channel=operands))
    grads = delta.run_backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec, by_channel=operands)
    found = {"h": out.h, "C": out.C} | {f"d{name}": getattr(grads, name) for name in p.leaves}
    return {name: t.cpu() for name, t in found.items()}


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1, "carried": False, "B": 1, "seed": 1},
    "tiles": {"T": 150, "B": 1, "H": 1, "Hq": 1},
    "heads that share keys": {"T": 70, "Hq": 1, "H": 3, "B": 1},
    "two batch rows": {"T": 66, "H": 1, "Hq": 1, "K": 96},
    "packed": {"lengths": (0, 70, 1, 64, 0), "Hq": 1},
    "two blocks of channels": {"T": 70, "K": 200, "B": 1, "H": 1, "Hq": 1},
}


@pytest.mark.parametrize("model", ["gla", "kda", "gdn2"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str) -> None:
    p = delta_problem(model, **{"K": 128, "V": 16, **shape}, dtype=torch.bfloat16)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("gates", ["closed", "resets", "short"])
@pytest.mark.parametrize("model", ["gla", "kda"])
def test_tiles_that_need_levels(model: str, gates: str) -> None:
    """Some tiles are computed by the kernels in Gluon, the others by Triton's."""
    p = delta_problem(model, gates=gates, T=200, B=1, H=1, Hq=1, K=128, V=16, dtype=torch.bfloat16)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("alike", [0.9] if INTERPRETED else [0.0, 0.9])
@pytest.mark.parametrize("gates", GATES_WITH_MEMORY)
@pytest.mark.parametrize("model", ["gla", "kda"])
def test_rounding(model: str, gates: str, alike: float) -> None:
    """In bfloat16 errors are at most 1.5 times what rounding inputs and outputs costs, 2.5 times for long gates."""
    p = delta_problem(model, gates=gates, T=300 if INTERPRETED else 1000, B=1, H=1, Hq=1, K=128, V=64, alike=alike)
    check_beside_rounding(p, gates, solve, torch.bfloat16)
