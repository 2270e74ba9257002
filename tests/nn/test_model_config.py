"""ModelConfig: named sizes, numbers of parameters, and invalid fields."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.config import Mixer

# name, heads -> d_model, blocks, dhv, ffn, vocabulary; table 4, and xLSTM-7B
NAMED = {
    ("160M", 6): (768, 12, 128, 2048, 50257),
    ("160M", 12): (768, 12, 64, 2048, 50257),
    ("400M", 8): (1024, 24, 128, 2752, 50257),
    ("400M", 16): (1024, 24, 64, 2752, 50257),
    ("1.4B", 4): (2048, 24, 512, 5504, 50257),
    ("1.4B", 8): (2048, 24, 256, 5504, 50257),
    ("1.4B", 16): (2048, 24, 128, 5504, 50257),
    ("7B", 8): (4096, 32, 512, 10944, 50304),
}
STATED = {"160M": 160e6, "400M": 400e6, "1.4B": 1.4e9, "7B": 6.87e9}


@pytest.mark.parametrize(("name", "heads"), NAMED)
@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig", "attention"])
def test_named_sizes_and_their_parameters(name: str, heads: int, mixer: str) -> None:
    config = ModelConfig.named(name, num_heads=heads, mixer=mixer)
    d, blocks, dhv, ffn, vocab = NAMED[name, heads]
    assert (config.d_model, config.num_blocks, config.head_dim) == (d, blocks, dhv)
    assert (config.ffn_dim, config.vocab_size) == (ffn, vocab)

    mix = 4 * d * d  # attention: q, k, v, out
    if mixer != "attention":
        # q and k of half width, v, output gate, out; two gates with bias; norm
        mix = (2 * d * d // 2 + 3 * d * d) + 2 * (d * heads + heads) + d
    expected = 2 * vocab * d + d + blocks * (mix + 3 * d * ffn + 2 * d)
    with torch.device("meta"):
        model = LanguageModel(config)
    assert model.num_parameters() == expected
    assert math.isclose(expected, STATED[name], rel_tol=0.03)


@pytest.mark.parametrize(
    ("factor", "multiple", "width"), [(8 / 3, 64, 128), (8 / 3, 1, 86), (2.0, 24, 72), (3, 16, 96)]
)
def test_the_hidden_width_is_rounded_up(factor: float, multiple: int, width: int) -> None:
    config = ModelConfig(d_model=32, num_blocks=1, num_heads=2, ffn_factor=factor, ffn_multiple=multiple)
    assert config.ffn_dim == width
    assert LanguageModel(config).blocks[0].ffn.down_proj.in_features == width


def test_default_heads() -> None:
    assert [ModelConfig.named(name).num_heads for name in STATED] == [6, 8, 8, 8]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ModelConfig.named("160m"), ["name", "'160m'", "'160M'", "'7B'"]),
        (lambda: ModelConfig.named("160M", num_heads=5), ["num_heads", "5", "6, 12"]),
        (lambda: ModelConfig.named("7B", num_heads=4), ["num_heads", "4", "8", "'7B'"]),
    ],
)
def test_unknown_names_and_heads_list_what_exists(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 0),
        ("d_model", 32.0),
        ("num_blocks", True),
        ("num_blocks", -1),
        ("num_heads", 3),
        ("num_heads", "2"),
        ("vocab_size", 0),
        ("mixer", "mlstm"),
        ("qk_factor", 0.0),
        ("qk_factor", 0.3),
        ("ffn_factor", math.inf),
        ("ffn_factor", -1),
        ("ffn_multiple", 0),
        ("gate_soft_cap", 0),
        ("logit_soft_cap", math.nan),
        ("norm_eps", 0.0),
        ("head_norm_eps", -1e-6),
        ("head_norm", "group"),
        ("input_gate_bias", math.inf),
        ("input_gate_bias", None),
        ("input_gate_trainable", 1),
        ("forget_gate_bias", (3.0,)),
        ("forget_gate_bias", 3.0),
        ("forget_gate_bias", (3.0, math.nan)),
        ("chunk_size", 0),
        ("chunk_size", 1.5),
        ("backend", 1),
        ("backend", "nope"),
        ("backend", ["chunkwise"]),
        ("d_model", 10**400),
        ("vocab_size", 2**40),
        ("vocab_size", -5),
        ("qk_factor", 1e308),
        ("qk_factor", "0.5"),
        ("ffn_factor", 1e-12),
        ("ffn_factor", 10**400),
        ("norm_eps", True),
        ("mixer", ["mlstm_exp"]),
        ("head_norm", None),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object) -> None:
    right = {"d_model": 32, "num_blocks": 1, "num_heads": 2, "vocab_size": 11}
    with pytest.raises(ValueError) as error:
        ModelConfig(**right | {field: value})
    assert str(error.value).startswith(f"{field}: got {value!r}, expected ")


def test_attention_needs_even_heads() -> None:
    with pytest.raises(ValueError, match=r"num_heads: got 2, expected an even d_model / num_heads"):
        ModelConfig(d_model=6, num_blocks=1, num_heads=2, mixer="attention")
    ModelConfig(d_model=6, num_blocks=1, num_heads=3, mixer="attention")


def test_config_survives_json_and_is_frozen() -> None:
    config = ModelConfig.named("160M", num_heads=12, mixer="mlstm_sig", head_norm="rms", forget_gate_bias=(1.0, 2.0))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 1


@pytest.mark.parametrize(
    ("change", "words"), [({"depth": 1}, ["depth", "num_blocks"]), ({"d_model": None}, ["d_model", "None"])]
)
def test_from_dict_refuses(change: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(ModelConfig.named("160M").to_dict() | change)
    assert all(word in str(error.value) for word in words)
    with pytest.raises(ValueError, match=r"also num_heads"):
        ModelConfig.from_dict({"d_model": 8, "num_blocks": 1})


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^fields: got list, expected a mapping"):
        ModelConfig.from_dict(["d_model"])
    with pytest.raises(ValueError, match=r"^name: got \['7B'\], expected one of '160M'"):
        ModelConfig.named(["7B"])
    with pytest.raises(TypeError, match=r"^config: got dict, expected a ModelConfig"):
        LanguageModel({"d_model": 32})


def test_layers_are_repeated_over_the_blocks() -> None:
    fields = {"d_model": 32, "num_heads": 2, "vocab_size": 11}
    config = ModelConfig(num_blocks=6, layers=["gla", "gla", "gla", "attention"], **fields)
    assert config.block_mixers == ("gla", "gla", "gla", "attention", "gla", "gla")
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert [type(block.mixer).__name__ for block in LanguageModel(config).blocks][2:4] == [
        "GatedLinearAttention", "Attention",
    ]  # fmt: skip
    assert config.mixer_counts == {"gla": 5, "attention": 1}
    assert dataclasses.replace(config, num_blocks=2**31 - 1).mixer_counts["attention"] == 2**29 - 1
    assert dataclasses.replace(config, num_blocks=2).block_mixers == ("gla", "gla")
    assert ModelConfig(num_blocks=2, **fields).block_mixers == ("mlstm_exp", "mlstm_exp")
    old = {name: value for name, value in ModelConfig(num_blocks=2, **fields).to_dict().items() if name != "layers"}
    assert ModelConfig.from_dict(old) == ModelConfig(num_blocks=2, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ["gla", "gdn"]}, r"layers: got \('gla', 'gdn'\), expected None or a sequence of 'mlstm_exp', "),
        ({"layers": "gla"}, r"layers: got 'gla', expected None or a sequence of "),
        ({"layers": []}, r"layers: got \(\), expected None or a sequence of "),
        ({"layers": ["gla"], "mixer": "kda"}, r"mixer: got 'kda', expected no mixer together with layers"),
        (
            {"conv_size": 7},
            r"conv_size: got 7, .* 'mlstm_exp': only 'mamba2', 'delta_net', 'gated_delta_net', 'kda' have",
        ),
        ({"mixer": "gla", "window": 8}, r"window: got 8, expected None with 'gla': only 'attention' has it$"),
        (
            {"layers": ["kda", "retnet", "attention"], "rope_base": 5e3},  # two blocks, and none with attention
            r"rope_base: got 5000.0, expected 10000.0 with 'kda', 'retnet': only 'attention' has it$",
        ),
        ({"mixer": "gla", "key_width": 0.01}, r"key_width: got 0.01, expected one that makes key_width \* 32 / 2 a "),
        ({"mixer": "retnet", "key_width": 15 / 16}, r"num_heads: got 2, expected one that makes retnet's key dim"),
        ({"layers": ["gla", "mamba2"], "mamba_head_dim": 48}, r"mamba_head_dim: got 48, expected a divisor of .*, 64"),
        ({"mixer": "attention", "num_kv_heads": 4}, r"num_kv_heads: got 4, expected None or a divisor of num_heads, 2"),
        ({"window": 0}, r"window: got 0, expected None or an int of at least 1"),
        ({"attention_sinks": 1}, r"attention_sinks: got 1, expected True or False"),
    ],
)
def test_fields_of_mixers_are_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelConfig(**{"d_model": 32, "num_blocks": 2, "num_heads": 2, "vocab_size": 11} | fields)


OTHER_VALUES = {
    "qk_factor": 0.25, "gate_soft_cap": 3.0, "head_norm": "rms", "head_norm_eps": 1e-4, "input_gate_bias": -1.0,
    "input_gate_trainable": False, "forget_gate_bias": (1.0, 2.0), "key_width": 0.25, "value_width": 0.25,
    "conv_size": 3, "negative_eigenvalues": True, "mamba_expand": 4, "mamba_head_dim": 32, "mamba_state_dim": 16,
    "num_kv_heads": 1, "window": 3, "attention_sinks": True, "rope_base": 5.0, "chunk_size": 64, "backend": "chunkwise",
}  # fmt: skip
READERS = {f.name: f.metadata["mixers"] for f in dataclasses.fields(ModelConfig) if f.metadata}
OF_ALL = {
    "d_model", "num_blocks", "num_heads", "mixer", "layers", "vocab_size", "ffn_factor", "ffn_multiple",
    "logit_soft_cap", "norm_eps", "batch_invariant",
}  # fmt: skip
SIZES = {"d_model": 32, "num_blocks": 1, "num_heads": 2, "vocab_size": 11}


def test_each_option_has_its_mixers() -> None:
    assert READERS.keys() == OTHER_VALUES.keys()
    assert {f.name for f in dataclasses.fields(ModelConfig)} - READERS.keys() == OF_ALL


@pytest.mark.parametrize("mixer", get_args(Mixer))
@pytest.mark.parametrize("option", OTHER_VALUES)
def test_an_option_changes_a_mixer_or_is_refused(mixer: str, option: str) -> None:
    """An option that is taken changes an attribute or a weight of the layer; one that is refused has no part in it."""
    fields, other = SIZES | {"mixer": mixer}, {option: OTHER_VALUES[option]}

    def layer(config: ModelConfig) -> dict[str, object]:
        torch.manual_seed(0)
        built = LanguageModel(config).blocks[0].mixer
        found: dict[str, object] = {}
        for name, module in built.named_modules():
            kept = {key: value for key, value in vars(module).items() if not key.startswith("_")}
            found |= {f"{name}.{key}": repr(value) for key, value in kept.items()}
        return found | {name: (p.tolist(), p.requires_grad) for name, p in built.named_parameters()}

    plain, stored = layer(ModelConfig(**fields)), ModelConfig.from_dict(fields | other)
    if mixer in READERS[option]:
        assert ModelConfig(**fields | other) == stored
        assert layer(stored) != plain
    else:
        with pytest.raises(ValueError, match=f"^{option}: got .* with '{mixer}': only '.* (has|have) it$"):
            ModelConfig(**fields | other)
        with pytest.raises(ValueError, match=f"^{option}: got .* with '{mixer}'"):
            ModelConfig.from_dict(fields, other)
        assert layer(stored) == plain


@pytest.mark.parametrize("option", OTHER_VALUES)
def test_an_option_that_nobody_reads_stays_with_a_config(option: str) -> None:
    """What another config or a stored one has is no error, whatever is made of it."""
    mixer = next(name for name in get_args(Mixer) if name not in READERS[option])
    other = {option: OTHER_VALUES[option]}
    reading = ModelConfig(**SIZES, mixer=READERS[option][0], **other)  # type: ignore[arg-type]
    stored = ModelConfig.from_dict(json.loads(json.dumps(SIZES | {"mixer": mixer} | other)))
    assert dataclasses.replace(reading, mixer=mixer) == stored
    for again in (
        ModelConfig.from_dict(json.loads(json.dumps(stored.to_dict()))), ModelConfig.from_dict(stored.to_dict(), other),
        pickle.loads(pickle.dumps(stored)), copy.deepcopy(stored), dataclasses.replace(stored, **other),
    ):  # fmt: skip
        assert (again, hash(again)) == (stored, hash(stored))
        assert getattr(dataclasses.replace(again, num_blocks=2), option) == other[option]
    assert dataclasses.replace(stored, mixer=reading.mixer) == reading
    plain = ModelConfig(**SIZES, mixer=mixer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{option}: got "):
        dataclasses.replace(plain, **other)


def test_blocks_of_a_pattern_take_the_options_of_all_its_mixers() -> None:
    config = ModelConfig(**SIZES | {"num_blocks": 2}, layers=("gla", "attention"), window=7, key_width=0.25)
    model = LanguageModel(config)
    assert (model.blocks[0].mixer.qk_head_dim, model.blocks[1].mixer.window) == (4, 7)
    assert config.for_block(0).window == 7
    assert dataclasses.replace(config, num_blocks=1).window == 7


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"mixer": "gated_delta_net", "d_model": 2048, "num_heads": 6}, (256, 512)),  # as the paper's 1.3B
        ({"mixer": "kda", "d_model": 2304, "num_heads": 32, "key_width": 16 / 9, "value_width": 16 / 9}, (128, 128)),
        ({"mixer": "delta_net", "d_model": 30, "num_heads": 4, "key_width": 2 / 15, "value_width": 0.4}, (1, 3)),
        ({"mixer": "mamba2", "d_model": 96, "num_heads": 5}, (128, 64)),
    ],
    ids=lambda x: x["mixer"] if isinstance(x, dict) else None,
)
def test_heads_need_not_divide_the_width(fields: dict, heads: tuple[int, int]) -> None:
    """Kimi Linear's 32 heads of 128 channels are wider together than its 2,304 channels."""
    config = ModelConfig(num_blocks=1, vocab_size=3, **fields)
    assert (config.qk_head_dim, config.head_dim) == heads
    with torch.device("meta"):
        model = LanguageModel(config)
    if fields["mixer"] != "mamba2":
        weight = model.blocks[0].mixer.v_proj.weight
        assert weight.shape == (fields["num_heads"] * heads[1], fields["d_model"])
    with pytest.raises(ValueError, match=f"num_heads: got 7, expected a divisor of d_model, {fields['d_model']}"):
        ModelConfig(num_blocks=2, **{**fields, "mixer": "mlstm_exp", "num_heads": 7})
