"""The smallest models of transformers that have layers of each class that tfla computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": LAYERS,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4,
}  # fmt: skip


class SmallModel(NamedTuple):
    """The classes of a model and the fields of a small config."""

    model: str
    config: str
    fields: dict[str, Any]


MODELS = {
    "bamba": SmallModel("BambaForCausalLM", "BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": SmallModel("FalconH1ForCausalLM", "FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "falcon_h1_norm": SmallModel(
        "FalconH1ForCausalLM", "FalconH1Config", {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True}
    ),
    "granitemoehybrid": SmallModel(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": LAYERS, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "mamba2": SmallModel(
        "Mamba2ForCausalLM", "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8,
         "time_step_limit": (0.0, 0.9)},
    ),
    "nemotron_h": SmallModel(
        "NemotronHForCausalLM", "NemotronHConfig",
        {"layers_block_type": [*LAYERS, "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 2, "chunk_size": 8, "head_dim": 8},
    ),
    "zamba2": SmallModel(
        "Zamba2ForCausalLM", "Zamba2Config",
        {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 4,
         "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 8},
    ),
    "olmo_hybrid": SmallModel("OlmoHybridForCausalLM", "OlmoHybridConfig", DELTA),
    "qwen3_next": SmallModel("Qwen3NextForCausalLM", "Qwen3NextConfig", {**DELTA, **EXPERTS, "head_dim": 16}),
    "qwen3_5": SmallModel("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**DELTA, "head_dim": 16}),
    "qwen3_5_moe": SmallModel(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, "head_dim": 16}
    ),
    "qwen4_exp": SmallModel(
        "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {**DELTA, **EXPERTS, "head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
         "indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    ),
    "bailing_hybrid": SmallModel(
        "BailingHybridForCausalLM", "BailingHybridConfig", {**LATENT, "head_dim": 16, "layer_types": LAYERS}
    ),
    "glm5_next": SmallModel(
        "Glm5NextTextModel", "Glm5NextTextConfig",
        {**LATENT, "layer_types": LAYERS, "linear_head_dim": 16, "linear_num_heads": 2, "q_lora_rank": 16,
         "qk_rope_head_dim": 0, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 64, "index_kpool": 4},
    ),
    "kimi_linear": SmallModel(
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {**LATENT, "linear_head_dim": 16, "linear_num_heads": 2, "layer_types": LAYERS,
         "mlp_layer_types": ["dense"] * 3},
    ),
    "minimax": SmallModel(
        "MiniMaxForCausalLM", "MiniMaxConfig",
        {"layer_types": LAYERS, "block_size": 8, "num_local_experts": 4, "linear_attn_alpha_factor": 1.5},
    ),
}  # fmt: skip
# Fields of configs that change what a layer computes, each set beside the small config of its model.
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "time_step_limit": (0.2, 0.6)}),
    ("mamba2", {"n_groups": 4, "conv_kernel": 2, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("bamba", {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": (0.1, 0.7)}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1, "mamba_d_conv": 3}),
    ("falcon_h1",
     {"mamba_rms_norm": True, "mamba_proj_bias": True, "mamba_conv_bias": False, "projectors_bias": True,
      "ssm_multipliers": [0.5, 0.7, 1.2, 1.3, 0.9], "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.8,
      "key_multiplier": 0.7, "time_step_limit": (0.1, 0.7), "tie_word_embeddings": True}),
    ("granitemoehybrid",
     {"mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "num_local_experts": 0,
      "time_step_limit": (0.1, 0.7), "residual_multiplier": 0.7, "tie_word_embeddings": True}),
    ("nemotron_h",
     {"n_groups": 1, "use_bias": True, "mamba_proj_bias": True, "use_conv_bias": False, "time_step_limit": (0.1, 0.7)}),
    ("zamba2",
     {"mamba_ngroups": 1, "use_conv_bias": False, "add_bias_linear": True, "use_mem_rope": True, "num_mem_blocks": 2}),
    ("zamba2", {"mamba_ngroups": 4, "mamba_d_conv": 3, "use_mem_eff_path": True, "time_step_min": 0.3}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 4}),
    ("qwen3_next", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
    ("qwen3_5", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 8}),
    ("qwen3_5_moe", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
    ("qwen4_exp", {"linear_num_key_heads": 4, "number_of_conv_states": 2, "output_gate_type": "sigmoid"}),
    ("bailing_hybrid", {"kda_safe_gate": False, "linear_conv_kernel_dim": 2}),
    ("bailing_hybrid", {"kda_lower_bound": -2.0, "tie_word_embeddings": True}),
    ("glm5_next", {"linear_lower_bound": -2.0, "linear_conv_kernel_dim": 2}),
    ("kimi_linear", {"linear_conv_kernel_dim": 2, "linear_num_heads": 1, "tie_word_embeddings": True}),
    ("minimax", {"hidden_act": "gelu", "block_size": 5, "linear_attn_beta_factor": 0.7}),
]  # fmt: skip
COMMON = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 60, "initializer_range": 0.2,
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model in eval mode, with the fields of its small config changed by `changes`."""
    model, config, fields = MODELS[name]
    torch.manual_seed(0)
    with use_default_dtype(dtype):
        own = getattr(transformers, model)(getattr(transformers, config)(**COMMON | fields | changes))
    own.set_experts_implementation("eager")  # the others have no float64
    return own.to(dtype).eval()


@contextmanager
def use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make the dtype torch's default one; modules compute tables of factors in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def use_torch_functions(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Make the model's own path compute in PyTorch, also where packages with its kernels are installed.

    Those kernels need a GPU. transformers wraps the functions in PyTorch, which stay reachable as ``__wrapped__``.
    """
    for module in {sys.modules[type(each).__module__] for each in model.modules()}:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and "is_new_implementation" in inspect.getclosurevars(value).nonlocals:
                monkeypatch.setattr(module, name, value.__wrapped__)
