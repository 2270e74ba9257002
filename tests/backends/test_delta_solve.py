"""X of every tile by `solve_tiles` of the Triton backend, against its definition in float64.

They run on a GPU. With TRITON_INTERPRET=1 they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem
from torch import Tensor

from tfla.backends.base import sequence_bounds
from tfla.backends.delta import DeltaInputs

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_gpu
pytest.importorskip("triton")

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TILE = 64


def by_definition(p: DeltaProblem) -> Tensor:
    """X = M (I + B M)^-1 of every tile, (B, T, H, TILE), with M_ij = r_i . k_j times the decays from j to i, j < i."""
    x = p.x
    B, T, H = x.v.shape[:3]
    k, r = (t.double().repeat_interleave(H // t.shape[2], 2) for t in (x.k, x.k if x.read_key is None else x.read_key))
    log_f = torch.zeros(B, T, H, dtype=torch.float64) if x.log_f is None else x.log_f.double()
    beta = torch.ones_like(log_f) if x.beta is None else x.beta.double()
    X = torch.zeros(B, T, H, TILE, dtype=torch.float64)
    for b, first, last in sequence_bounds(x):
        for a in range(first, last, TILE):
            tile = slice(a, min(a + TILE, last))
            steps = tile.stop - a
            for h in range(H):
                M = r[b, tile, h] @ k[b, tile, h].mT
                for i in range(steps):
                    for j in range(i):
                        M[i, j] *= log_f[b, a + j + 1 : a + i + 1, h].sum().exp()
                M = M.tril(-1)
                X[b, tile, h, :steps] = M @ torch.linalg.inv(torch.eye(steps) + beta[b, tile, h, None] * M)
    return X


SIZES: dict[str, dict[str, Any]] = {
    "three tiles": {"T": 150, "B": 1},
    "part of a block": {"T": 5, "B": 2, "K": 20},
    "heads that share keys": {"T": 70, "Hq": 1, "H": 3, "B": 1},
    "packed": {"lengths": (0, 70, 1, 64)},
    "resets": {"T": 70, "B": 1, "gates": "resets"},
    "alike keys": {"T": 64, "B": 1, "gates": "long", "alike": 0.9},
}


@pytest.mark.parametrize("model", ["deltanet", "gdn", "read"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_is_its_definition(sizes: dict[str, Any], model: str) -> None:
    from tfla.backends.triton import delta

    p = delta_problem(model, **{"K": 32, "V": 16, **sizes}, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    out = delta.run_forward(x, p.spec("fused"))
    assert error(out.X.cpu(), by_definition(p)) <= 2 * TOLERANCE[DTYPE]
