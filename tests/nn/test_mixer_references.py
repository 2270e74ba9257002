"""The mixers beside their reference implementations: numbers of parameters, and outputs with the same weights."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.mixers import MIXERS

# Parameters of a layer of flash-linear-attention 0.6 with its default options, or of the paper where "paper" is said.
# Its Gated DeltaNet has 6 heads, which do not divide 2048; 8 heads have 4 more rows of gates and a smaller norm.
# KDA has no bias in its output gate, as the paper and the released model; flash-linear-attention has value_dim more.
# The mLSTM is that of a layer of transformers' xLSTM with the sizes of NX-AI/xLSTM-7b.
COUNTS: list[tuple[dict[str, Any], int]] = [
    ({"mixer": "mlstm_exp", "d_model": 4096, "num_heads": 8}, 67_178_512),
    ({"mixer": "mlstm_sig", "d_model": 4096, "num_heads": 8}, 67_178_512),
    ({"mixer": "gla", "d_model": 1024, "num_heads": 4}, 4_219_648),
    ({"mixer": "retnet", "d_model": 1024, "num_heads": 4}, 8_389_120),
    ({"mixer": "delta_net", "d_model": 1024, "num_heads": 8}, 4_214_912),
    ({"mixer": "gated_delta_net", "d_model": 2048, "num_heads": 8}, 25_215_500 + 4 * 2048 + 4 - 128),
    ({"mixer": "kda", "d_model": 2048, "num_heads": 16}, 17_887_376 - 2048),
    ({"mixer": "mamba2", "d_model": 2048, "num_heads": 16}, 25_847_232),
    ({"mixer": "attention", "d_model": 1024, "num_heads": 8}, 4 * 1024**2),
]


@pytest.mark.parametrize(("fields", "count"), COUNTS, ids=lambda x: x["mixer"] if isinstance(x, dict) else "")
def test_numbers_of_parameters_are_those_of_the_reference(fields: dict[str, Any], count: int) -> None:
    config = ModelConfig(num_blocks=1, **fields)
    with torch.device("meta"):
        layer = MIXERS[config.mixer](config)  # type: ignore[call-arg]
    assert sum(p.numel() for p in layer.parameters()) == count


@pytest.mark.parametrize(("d_model", "blocks", "size"), [(768, 24, 130e6), (1024, 48, 370e6), (2048, 48, 1.3e9)])
def test_sizes_of_the_mamba2_paper(d_model: int, blocks: int, size: float) -> None:
    """Their models are blocks of the mixer and its norm alone, with one matrix for both embeddings."""
    config = ModelConfig(d_model=d_model, num_blocks=1, num_heads=1, mixer="mamba2")
    with torch.device("meta"):
        layer = MIXERS["mamba2"](config)  # type: ignore[call-arg]
    total = blocks * (sum(p.numel() for p in layer.parameters()) + d_model) + d_model + 50288 * d_model
    assert math.isclose(total, size, rel_tol=0.035)


def test_size_of_xlstm_7b() -> None:
    """The number of parameters of the released model, which transformers' default config describes."""
    config = ModelConfig(d_model=4096, num_blocks=32, num_heads=8, vocab_size=50_304)
    with torch.device("meta"):
        assert LanguageModel(config).num_parameters() == 6_865_424_896


transformers = pytest.importorskip("transformers", reason='pip install "tfla[transformers]"')
X = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))


def random_mixer(**fields: Any) -> Any:
    """Return the mixer of a model with random weights."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**{"d_model": 32, "num_blocks": 1, "num_heads": 2, "vocab_size": 8} | fields))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.blocks[0].mixer


def load(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Load weights into a module that has these parameters and no others."""
    module.load_state_dict({name: w.detach() for name, w in weights.items()}, strict=True)
    return module.eval()


def check(mixer: Any, found: Tensor) -> None:
    """Check that a reference's output of X is the mixer's."""
    expected = mixer(X)[0]
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def take_plain_function(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], name: str) -> None:
    """Let a reference use its function in plain PyTorch, which another installed package would replace."""
    where = sys.modules[kind.__module__]
    monkeypatch.setattr(where, name, getattr(where, name).__wrapped__)


def joined_convolutions(mixer: Any) -> Tensor:
    """Return the weights (channels, 1, size) of one convolution of q, k and v."""
    return torch.cat([mixer.q_conv.weight, mixer.k_conv.weight, mixer.v_conv.weight])[:, None]


@torch.no_grad()
def test_mamba2_is_that_of_transformers() -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    mixer = random_mixer(mixer="mamba2", mamba_head_dim=16, mamba_state_dim=8)
    config = Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=8, expand=2, n_groups=1, chunk_size=16, use_bias=False,
        layer_norm_epsilon=1e-6, num_hidden_layers=1,
    )  # fmt: skip
    projections = (mixer.gate_proj, mixer.v_proj, mixer.k_proj, mixer.q_proj, mixer.dt_proj)
    convolutions = (mixer.v_conv, mixer.k_conv, mixer.q_conv)
    theirs = load(
        Mamba2Mixer(config, layer_idx=0),
        {
            "in_proj.weight": torch.cat([p.weight for p in projections]),
            "conv1d.weight": torch.cat([c.weight for c in convolutions])[:, None],
            "conv1d.bias": torch.cat([c.bias for c in convolutions]),
            "A_log": mixer.decay.A_log, "dt_bias": mixer.decay.dt_bias, "D": mixer.D, "norm.weight": mixer.norm.weight,
            "out_proj.weight": mixer.out_proj.weight,
        },
    )  # fmt: skip
    check(mixer, theirs(X))


@torch.no_grad()
def test_gated_delta_net_is_that_of_qwen3_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    take_plain_function(monkeypatch, Qwen3NextGatedDeltaNet, "torch_chunk_gated_delta_rule")
    mixer = random_mixer(mixer="gated_delta_net")
    config = Qwen3NextConfig(
        hidden_size=32, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=12,
        linear_value_head_dim=24, rms_norm_eps=1e-6, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    by_head = [p.weight.unflatten(0, (2, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.gate_proj)]
    theirs = load(
        Qwen3NextGatedDeltaNet(config, 0),
        {
            "in_proj_qkvz.weight": torch.cat(by_head, 1).flatten(0, 1),
            "in_proj_ba.weight": torch.stack([mixer.beta_proj.weight, mixer.decay_proj.weight], 1).flatten(0, 1),
            "conv1d.weight": joined_convolutions(mixer),
            "A_log": mixer.decay.A_log, "dt_bias": mixer.decay.dt_bias, "norm.weight": mixer.norm.weight,
            "out_proj.weight": mixer.out_proj.weight,
        },
    )  # fmt: skip
    check(mixer, theirs(X))


@torch.no_grad()
def test_kda_is_that_of_kimi_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearConfig, KimiLinearDeltaAttention

    take_plain_function(monkeypatch, KimiLinearDeltaAttention, "chunk_kimi_delta_attention")
    mixer = random_mixer(mixer="kda")
    config = KimiLinearConfig(
        hidden_size=32, linear_num_heads=2, linear_head_dim=16, rms_norm_eps=1e-6, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = KimiLinearDeltaAttention(config, 0)
    gate = {name: p.shape for name, p in theirs.forget_gate.named_parameters()}
    names = {"A_log": mixer.decay.A_log, "dt_bias": mixer.decay.dt_bias}
    names |= {"f_a_proj.weight": mixer.decay_proj.down.weight, "f_b_proj.weight": mixer.decay_proj.up.weight}
    load(
        theirs,
        {
            "q_proj.weight": mixer.q_proj.weight, "k_proj.weight": mixer.k_proj.weight,
            "v_proj.weight": mixer.v_proj.weight, "conv1d.weight": joined_convolutions(mixer),
            **{f"forget_gate.{name}": names[name].reshape(shape) for name, shape in gate.items()},
            "b_proj.weight": mixer.beta_proj.weight, "g_a_proj.weight": mixer.gate_proj.down.weight,
            "g_b_proj.weight": mixer.gate_proj.up.weight, "o_norm.weight": mixer.norm.weight,
            "o_proj.weight": mixer.out_proj.weight,
        },
    )  # fmt: skip
    check(mixer, theirs(X))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 7])
def test_attention_is_that_of_gpt_oss(window: int | None) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig

    mixer = random_mixer(mixer="attention", num_heads=4, num_kv_heads=2, attention_sinks=True, window=window)
    kind = "full_attention" if window is None else "sliding_attention"
    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=False,
        sliding_window=window, layer_types=[kind], num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    theirs = load(
        GptOssAttention(config, 0),
        {
            "q_proj.weight": mixer.q_proj.weight, "k_proj.weight": mixer.k_proj.weight,
            "v_proj.weight": mixer.v_proj.weight, "o_proj.weight": mixer.out_proj.weight, "sinks": mixer.sinks.logits,
        },
    )  # fmt: skip
    angle = torch.arange(40)[:, None] * 10_000.0 ** -(torch.arange(4) / 4)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    hidden = (distance < 0) | (distance >= (window or 40))
    mask = torch.zeros(1, 1, 40, 40).masked_fill(hidden, -torch.inf)
    check(mixer, theirs(X, (angle.cos()[None], angle.sin()[None]), mask)[0])
