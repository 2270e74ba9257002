"""Small models of transformers that are tfla's language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.transformers import TflaConfig, TflaForCausalLM

SIZES: dict[str, Any] = {
    "d_model": 32, "num_heads": 2, "num_blocks": 4, "vocab_size": 61, "mamba_head_dim": 16, "mamba_state_dim": 16,
}  # fmt: skip
MIXTURES = [
    ("mlstm_exp", "gated_delta_net", "mamba2", "attention"),
    ("mlstm_sig", "retnet", "kda", "gla"),
    ("delta_net", "mlstm_exp", "attention"),
]


def make(layers: tuple[str, ...] = MIXTURES[0], dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """Return a model whose gates and norms are random too, in eval mode."""
    torch.manual_seed(0)
    model = TflaForCausalLM(TflaConfig.from_dict(SIZES | {"layers": layers} | fields)).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gate.weight" in name or "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
            if "input_gate.bias" in name:
                p.add_(9)
    return model


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))
