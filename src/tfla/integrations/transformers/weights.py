"""The conversion of weights between tfla.nn and the files of transformers' xLSTM, without transformers.

The files have the layout of xLSTM-7B (``NX-AI/xLSTM-7b``), as ``xLSTMForCausalLM.save_pretrained`` writes them. With
the weight mode "fused", weights that are multiplied with the same input are concatenated to one tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tfla._util.device import check_device
from tfla._util.files import write_atomically
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.pretrained import build_model, check_holds_no_run, import_safetensors, read_tensors, tensors_to_save
from tfla.nn.validation import check_weights_dtype

WeightMode = Literal["single", "fused"]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# From names of tensors in transformers to names in tfla.nn, of the model and of a block.
MODEL_NAMES = {
    "backbone.embeddings.weight": "embedding.weight",
    "backbone.out_norm.weight": "norm.weight",
    "lm_head.weight": "unembedding.weight",
}
BLOCK_NAMES = {
    "norm_mlstm.weight": "mixer_norm.weight",
    "mlstm_layer.q.weight": "mixer.q_proj.weight",
    "mlstm_layer.k.weight": "mixer.k_proj.weight",
    "mlstm_layer.v.weight": "mixer.v_proj.weight",
    "mlstm_layer.ogate_preact.weight": "mixer.output_gate.weight",
    "mlstm_layer.igate_preact.weight": "mixer.input_gate.weight",
    "mlstm_layer.igate_preact.bias": "mixer.input_gate.bias",
    "mlstm_layer.fgate_preact.weight": "mixer.forget_gate.weight",
    "mlstm_layer.fgate_preact.bias": "mixer.forget_gate.bias",
    "mlstm_layer.multihead_norm.weight": "mixer.head_norm.weight",
    "mlstm_layer.out_proj.weight": "mixer.out_proj.weight",
    "norm_ffn.weight": "ffn_norm.weight",
    "ffn.proj_up_gate.weight": "ffn.gate_proj.weight",
    "ffn.proj_up.weight": "ffn.up_proj.weight",
    "ffn.proj_down.weight": "ffn.down_proj.weight",
}
# From the name of a fused tensor to the names of its parts, in order.
FUSED_NAMES = {
    "mlstm_layer.qkv_opreact.weight": ("q.weight", "k.weight", "v.weight", "ogate_preact.weight"),
    "mlstm_layer.ifgate_preact.weight": ("igate_preact.weight", "fgate_preact.weight"),
    "mlstm_layer.ifgate_preact.bias": ("igate_preact.bias", "fgate_preact.bias"),
    "ffn.proj_up_gate_z.weight": ("proj_up_gate.weight", "proj_up.weight"),
}

# transformers' default of each field that a config may leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304, "hidden_size": 4096, "num_hidden_layers": 32, "num_heads": 8, "use_bias": False,
    "tie_word_embeddings": False, "norm_eps": 1e-6, "qk_dim_factor": 0.5, "v_dim_factor": 1.0,
    "ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64, "gate_soft_cap": 15.0, "output_logit_soft_cap": 30.0,
    "weight_mode": "single",
}  # fmt: skip
ALIASES = {"embedding_dim": "hidden_size", "num_blocks": "num_hidden_layers"}
REQUIRED = {"use_bias": False, "v_dim_factor": 1.0}


def load_xlstm(
    directory: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> LanguageModel:
    """Load a model of tfla.nn from a directory that ``xLSTMForCausalLM.save_pretrained`` wrote.

    A download of xLSTM-7B is such a directory. The logits are those of the model of transformers, within the rounding
    of the weights' dtype.

    Args:
        directory: the directory with config.json and with model.safetensors, or with its shards and their index.
        device: the device of the model; None is the CPU.
        dtype: the dtype of the weights; None is the stored one.
        overrides: fields of the :class:`tfla.nn.ModelConfig` to change, such as ``backend``.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a file is missing; the message names it.
        ValueError: a file is broken, the weights do not fit the config, or the config has something that tfla's model
            does not have, such as biases; the message names it. Also if the device does not exist or if weights cannot
            have that dtype.
        ImportError: safetensors is not installed.
    """
    check_weights_dtype(dtype)
    device = check_device("cpu" if device is None else device)
    directory = Path(directory)
    library_config = _read_json(directory / CONFIG)
    try:
        fields = _library_fields(library_config)
        config = ModelConfig.from_dict(_model_config(fields), overrides)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from error
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        tensors |= read_tensors(path, device)
    if fields["tie_word_embeddings"] and "backbone.embeddings.weight" in tensors:
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    misfit = f"{directory}: its tensors do not fit its {CONFIG}"
    try:
        named = _rename_tensors(_split_fused(tensors, config), config)
    except ValueError as error:
        raise ValueError(f"{misfit}: {error}") from error
    return build_model(LanguageModel, config, named, dtype, misfit)


def save_xlstm(model: LanguageModel, directory: str | Path, weight_mode: WeightMode = "single") -> None:
    """Write config.json and model.safetensors as ``xLSTMForCausalLM.from_pretrained`` reads them.

    Args:
        model: a model like xLSTM-7B: mLSTMexp, LayerNorm over heads, and the same epsilon in all norms.
        directory: the directory, which is created if it does not exist. Each file is replaced atomically.
        weight_mode: "single", or "fused", which concatenates weights that are multiplied with the same input.

    Raises:
        TypeError: the model is not a LanguageModel.
        ValueError: the files cannot represent the model, the weight mode is unknown, or the directory holds a run of
            ``tfla train``; the message says which.
        ImportError: safetensors is not installed.
        OSError: the directory cannot be written.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel of tfla.nn")
    if weight_mode not in get_args(WeightMode):
        raise ValueError(f"weight_mode: got {weight_mode!r}, expected 'single' or 'fused'")
    safetensors = import_safetensors()
    check_holds_no_run(Path(directory))
    config = model.config
    needed = {"mixer": "mlstm_exp", "layers": None, "head_norm": "layer", "head_norm_eps": config.norm_eps}
    for field, allowed in needed.items():
        if getattr(config, field) != allowed:
            raise ValueError(f"model: got {field} {getattr(config, field)!r} in its config, expected {allowed!r}")
    weights = tensors_to_save(model)
    tensors = {theirs: weights[ours] for theirs, ours in _tensor_names(config).items()}
    if weight_mode == "fused":
        tensors = _fuse(tensors, config)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    text = json.dumps(_library_config(config) | {"weight_mode": weight_mode, "dtype": dtype}, indent=2) + "\n"
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(
        directory / WEIGHTS, lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    )
    write_atomically(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected what xLSTMForCausalLM.save_pretrained writes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a JSON {type(content).__name__}, expected an object")
    return content


def _weight_files(directory: Path) -> list[Path]:
    """Return the path of the file with all weights, or the paths of the shards that the index names."""
    if (directory / WEIGHTS).is_file() or not (directory / INDEX).is_file():
        paths = [directory / WEIGHTS]
    else:
        names = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{directory / INDEX}: got no weight_map, expected the shard of each tensor")
        paths = [directory / name for name in sorted(set(names.values()))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected what xLSTMForCausalLM.save_pretrained writes")
    return paths


def _library_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Check transformers' config and return its fields that decide how the model is built, with defaults filled in."""
    if "mixer" in config and "model_type" not in config:
        raise ValueError(
            "got a config of tfla.nn, expected one of transformers; LanguageModel.from_pretrained loads it"
        )
    if config.get("model_type") != "xlstm":
        raise ValueError(f"model_type: got {config.get('model_type')!r}, expected 'xlstm'")
    config = {name: value for name, value in config.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            raise ValueError(f"{alias}: got {config[alias]!r}, expected that of {name}, {config[name]!r}")
    fields = {name: config.get(name, default) for name, default in DEFAULTS.items()}
    for name, allowed in REQUIRED.items():
        if fields[name] != allowed:
            raise ValueError(f"{name}: got {fields[name]!r}, expected {allowed!r}")
    return fields


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelConfig for those of transformers' config."""
    return {
        "d_model": fields["hidden_size"], "num_blocks": fields["num_hidden_layers"], "num_heads": fields["num_heads"],
        "vocab_size": fields["vocab_size"], "qk_factor": fields["qk_dim_factor"],
        "ffn_factor": fields["ffn_proj_factor"], "ffn_multiple": fields["ffn_round_up_to_multiple_of"],
        "gate_soft_cap": fields["gate_soft_cap"], "logit_soft_cap": fields["output_logit_soft_cap"],
        "norm_eps": fields["norm_eps"], "head_norm_eps": fields["norm_eps"],
    }  # fmt: skip


def _library_config(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' config for a ModelConfig."""
    size = {"hidden_size": config.d_model, "num_hidden_layers": config.num_blocks}
    return {
        "architectures": ["xLSTMForCausalLM"], "model_type": "xlstm", "vocab_size": config.vocab_size,
        **size, **{alias: size[name] for alias, name in ALIASES.items()}, "num_heads": config.num_heads,
        **REQUIRED, "tie_word_embeddings": False, "add_out_norm": True, "norm_eps": config.norm_eps,
        # The exact ratio of the widths, from which transformers' rounding to multiples gives the same width.
        "qk_dim_factor": config.qk_factor, "ffn_proj_factor": config.ffn_dim / config.d_model,
        "ffn_round_up_to_multiple_of": config.ffn_multiple, "gate_soft_cap": config.gate_soft_cap,
        "output_logit_soft_cap": config.logit_soft_cap,
    }  # fmt: skip


def _block_prefix(n: int) -> str:
    """Return the prefix of the names of block n's tensors in transformers."""
    return f"backbone.blocks.{n}."


def _tensor_names(config: ModelConfig) -> dict[str, str]:
    """Return a dict from every tensor's name in transformers to its name in tfla.nn."""
    blocks = range(config.num_blocks)
    return MODEL_NAMES | {
        _block_prefix(n) + theirs: f"blocks.{n}.{ours}" for n in blocks for theirs, ours in BLOCK_NAMES.items()
    }


def _rename_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors by their names in tfla.nn; unknown ones keep their names, and the model then refuses them."""
    names = _tensor_names(config)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}")
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def _fused_parts(fused: str) -> list[str]:
    """Return the names of the tensors that a fused tensor consists of."""
    module = fused.split(".", 1)[0]
    return [f"{module}.{part}" for part in FUSED_NAMES[fused]]


def _fuse(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Concatenate the weights of each block that are multiplied with the same input."""
    tensors = dict(tensors)
    for n in range(config.num_blocks):
        for fused in FUSED_NAMES:
            tensors[_block_prefix(n) + fused] = torch.cat(
                [tensors.pop(_block_prefix(n) + part) for part in _fused_parts(fused)]
            )
    return tensors


def _split_fused(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Split the fused weights of each block, the inverse of :func:`_fuse`; weights that are not fused stay."""
    heads, d = config.num_heads, config.d_model
    qk = heads * config.qk_head_dim
    widths = {"qkv_opreact": [qk, qk, d, d], "ifgate_preact": [heads, heads], "proj_up_gate_z": [config.ffn_dim] * 2}
    tensors = dict(tensors)
    for n in range(config.num_blocks):
        for fused in FUSED_NAMES:
            whole = tensors.pop(_block_prefix(n) + fused, None)
            if whole is None:
                continue
            sizes = widths[fused.split(".")[1]]
            if len(whole) != sum(sizes):
                raise ValueError(f"{_block_prefix(n)}{fused}: got {len(whole)} rows, expected {sum(sizes)}")
            for part, rows in zip(_fused_parts(fused), whole.split(sizes), strict=True):
                tensors[_block_prefix(n) + part] = rows.clone()
    return tensors
