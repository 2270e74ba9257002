"""Small batch-invariant models of all mixers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tfla.nn import LanguageModel, ModelConfig

SMALL: dict[str, Any] = {
    "d_model": 48, "num_blocks": 2, "num_heads": 3, "vocab_size": 29, "mamba_head_dim": 16, "mamba_state_dim": 8,
    "input_gate_bias": -1.0, "batch_invariant": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mlstm_exp": {},
    "mlstm_sig": {"mixer": "mlstm_sig"},
    "mamba2": {"mixer": "mamba2"},
    "retnet": {"mixer": "retnet"},
    "gla": {"mixer": "gla"},
    "delta_net": {"mixer": "delta_net"},
    "gated_delta_net": {"mixer": "gated_delta_net"},
    "kda": {"mixer": "kda", "negative_eigenvalues": True},
    "attention": {"mixer": "attention", "num_kv_heads": 1},
    "window and sinks": {"mixer": "attention", "window": 5, "attention_sinks": True},
    "hybrid": {"num_blocks": 3, "layers": ["gated_delta_net", "mlstm_exp", "attention"]},
}
RECURRENT = [case for case in CASES if case not in ("attention", "window and sinks", "hybrid")]
RECURRENCES: dict[str, Any] = {"num_blocks": 3, "layers": ["gated_delta_net", "mlstm_exp", "retnet"]}


def build(case: str, dtype: torch.dtype = torch.float32, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.from_dict(SMALL | CASES[case] | fields))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.to(dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 29, shape, generator=torch.Generator().manual_seed(sum(shape)))


def leaves(state: Any) -> list[Tensor]:
    return [t for t in tree_leaves(state) if t is not None]


def same(a: Any, b: Any) -> None:
    assert all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
