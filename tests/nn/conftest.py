"""Tiny models for the tests. Random numbers are added to their weights, so that gates depend on the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla.nn import LanguageModel, ModelConfig

MIXERS = ["mlstm_exp", "mlstm_sig", "attention"]
TINY: dict[str, Any] = {"d_model": 32, "num_blocks": 2, "num_heads": 2, "vocab_size": 23}

# ||a - b|| / ||b||; float64 leaves room for a closed forget gate of -1e4, which costs its decays four digits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check_close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    error = ((a - b).norm() / b.norm()).item()
    assert error <= TOLERANCE[a.dtype], error


def build(mixer: str = "mlstm_exp", dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> LanguageModel:
    torch.manual_seed(seed)
    config = ModelConfig.from_dict(TINY | {"mixer": mixer, "input_gate_bias": -1.0} | fields)
    model = LanguageModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.to(dtype)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LanguageModel]:
    return build


@pytest.fixture(scope="session")
def close() -> Callable[[Tensor, Tensor], None]:
    return check_close


@pytest.fixture(params=MIXERS)
def mixer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def document_start() -> Tensor:
    """Return starts of documents of many lengths, one token included; row 0 continues a document, row 1 starts one."""
    starts = torch.zeros(2, 19, dtype=torch.bool)
    starts[0, [3, 4, 11]] = True
    starts[1, [0, 8, 18]] = True
    return starts
