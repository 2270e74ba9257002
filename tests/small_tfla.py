"""Small models of transformers that are tfla's language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.transformers import TflaConfig, TflaForCausalLM

SIZES: dict[str, Any] = {
    "d_model": 32, "num_heads": 2, "num_blocks": 4, "vocab_size": 61, "mamba_head_dim": 16, "mamba_state_dim": 16,
}  # fmt: skip
# The same with heads that the kernels of all GPUs take as they are. Norms with a large epsilon keep gradients from
# depending on rounding where a state has a single write: its norm is one of a multiple of v, up to the sign.
WIDE: dict[str, Any] = {
    "d_model": 128, "qk_factor": 1.0, "key_width": 1.0, "value_width": 1.0, "mamba_head_dim": 64, "mamba_state_dim": 64,
    "head_norm_eps": 0.1, "norm_eps": 0.1,
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
