"""The module transformers with its own xLSTM layers, and small models of them.

With the xlstm package, transformers takes the layers of that package, and decides so when its xLSTM is first imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.utils.is_xlstm_available = lambda: False
from transformers.initialization import no_init_weights  # noqa: E402
from transformers.models.xlstm.modeling_xlstm import xLSTMCache  # noqa: E402

__all__ = ["build", "transformers", "uninitialized", "xLSTMCache"]

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4, "chunk_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def uninitialized(config: Any) -> Any:
    """Return an xLSTMForCausalLM without initializing its weights, which fails for weight_mode="fused"."""
    with no_init_weights():
        return transformers.xLSTMForCausalLM(config)


def build(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode with random weights; with those of the initialization, gates ignore the input."""
    model = uninitialized(transformers.xLSTMConfig(**SIZES | fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
            if "norm" in name:
                p.add_(1)
    return model.to(device, dtype).eval()
