"""Small xLSTMs of transformers with all weights in play: as they start, gates see no input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
# Its own path, also where the xlstm package is installed: it chooses when it is imported.
transformers.utils.is_xlstm_available = lambda: False
from transformers.initialization import no_init_weights  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4, "chunk_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def build(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **fields: Any) -> Any:
    """An xLSTMForCausalLM in eval mode, its weights random, its input gates open enough to matter."""
    config = transformers.xLSTMConfig(**SIZES | fields)
    with no_init_weights():  # that of weight_mode="fused" fails
        model = transformers.xLSTMForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
            if "norm" in name:
                p.add_(1)
    return model.to(device, dtype).eval()


@pytest.fixture(scope="session")
def make_xlstm() -> Callable[..., Any]:
    return build


@pytest.fixture(scope="session")
def tokens() -> Callable[..., Tensor]:
    """Random tokens (B, T), none of them the padding's."""
    return lambda *shape, seed=0: torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(seed))
