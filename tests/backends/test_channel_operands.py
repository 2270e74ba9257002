"""The Hopper kernels for operands of gates by channel, within the kernels of Triton, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import GATES_WITH_MEMORY, check_beside_rounding, check_beside_terms, delta_problem
from interpreted_bfloat16 import use_bfloat16
from test_delta_triton import BACKEND, solve

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_hopper
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.channel_operands", exc_type=ImportError)

KERNELS = ("channel_operands", "channel_solve")


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    from tfla._util import caching
    from tfla.backends.triton import channel_tiles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_tiles, "NATIVE", True)
        if INTERPRETED:
            from gluon_simulator import simulated

            names = ("mma", "pipeline", *KERNELS)
            modules = simulated(["tfla.backends.gpu.gate_kernels", *(f"tfla.backends.hopper.{name}" for name in names)])
            use_bfloat16(patch)
            patch.setattr(BACKEND, "unsupported", lambda x: None)
            patch.setattr(channel_tiles, "architecture", lambda device: 90)
            for name in KERNELS:
                kernel = getattr(modules[f"tfla.backends.hopper.{name}"], f"{name}_kernel")
                patch.setattr(getattr(channel_tiles, name), f"{name}_kernel", kernel)
        caching.clear_caches()
        yield
    caching.clear_caches()


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1, "carried": False, "B": 1, "seed": 1},
    "tiles": {"T": 150, "B": 1, "H": 1, "Hq": 1},
    "heads that share keys": {"T": 70, "Hq": 1, "H": 3, "B": 1},
    "two batch rows": {"T": 66, "H": 1, "Hq": 1, "K": 96},
    "packed": {"lengths": (0, 70, 1, 64, 0), "Hq": 1},
    "two blocks of channels": {"T": 70, "K": 200, "B": 1, "H": 1, "Hq": 1},
}


@pytest.mark.parametrize("model", ["gla", "kda", "gdn2", "before"])
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


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", GATES_WITH_MEMORY)
@pytest.mark.parametrize("model", ["gla", "kda"])
def test_rounding(model: str, gates: str, alike: float) -> None:
    """In bfloat16 errors are at most 1.5 times what rounding inputs and outputs costs, 2.5 times for long gates."""
    p = delta_problem(model, gates=gates, T=300 if INTERPRETED else 1000, B=1, H=1, Hq=1, K=128, V=64, alike=alike)
    check_beside_rounding(p, gates, solve, torch.bfloat16)
