"""The fixtures of small xLSTMs of transformers, and of tokens for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def make_xlstm() -> Callable[..., Any]:
    """Return a function that builds a small model."""
    from plain_transformers import build  # skips where transformers is not installed

    return build


@pytest.fixture(scope="session")
def tokens() -> Callable[..., Tensor]:
    """Return a function that draws random tokens (B, T), none of which is the padding token."""
    return lambda *shape, seed=0: torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(seed))
