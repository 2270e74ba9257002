"""The start of a run: the architecture of its model, from options or a saved model, and its initial weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tfla._util.errors import UserError, notice, one_line
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.config import SIZES
from tfla.nn.pretrained import find_weights, read_config, read_weights
from tfla.ops.delta_explain import explain_delta_rule
from tfla.ops.explain import explain
from tfla.train.checkpoint import find_model
from tfla.train.config import Data, Model, TrainConfig
from tfla.train.tokenizer import (
    INFO_FILE,
    TOKENIZER_FILE,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)

# Options of the model that a run with init_from may set, since they do not change what the saved model computes.
OVERRIDABLE = ("size", "backend", "chunk_size", "input_gate_trainable")


def saved_options(path: Path) -> tuple[Model, Data]:
    """Return the options of a run that has the architecture and the tokenizer of a saved model.

    Args:
        path: a run, a checkpoint or a saved model.

    Raises:
        UserError: there is no saved model at the path, or it is broken.
    """
    folder = find_model(path)
    saved = _read(folder)
    fields = {f.name: getattr(saved, f.name) for f in dataclasses.fields(Model) if f.name not in ("size", "backend")}
    saved_tokenizer = _tokenizer(folder)
    if not isinstance(saved_tokenizer, HuggingFaceTokenizer):
        return Model(**fields), Data()
    return Model(**fields), Data(tokenizer=str(folder / TOKENIZER_FILE), bos_token=saved_tokenizer.bos_token)


def architecture(
    config: TrainConfig, tokenizer: Tokenizer, checkpoint: Path | None, old: Model | None = None
) -> ModelConfig:
    """Return the architecture of a run's model: that of its options, or with init_from that of the saved model.

    Args:
        config: the options of the run.
        tokenizer: the tokenizer of the run.
        checkpoint: the newest checkpoint of the run, None if it has none.
        old: the options of the model that the run was started with; None if it is new. They are no errors where no
            mixer reads them.

    Raises:
        UserError: options fit neither each other nor the saved model; the message names them.
    """
    if config.init_from is None:
        return config.model.build(tokenizer.vocab_size, old)
    config.model.check()
    folder = checkpoint or find_model(config.init_from)
    saved = _read(folder)
    if checkpoint is None:
        _check_model(config.model, saved, config.init_from)
        _check_tokenizer(config, tokenizer, folder)
    if tokenizer.vocab_size > saved.vocab_size:
        raise UserError(
            f"data.tokenizer: got {tokenizer.vocab_size} tokens, expected at most the {saved.vocab_size} of "
            f"{config.init_from}"
        )
    overrides = {name: getattr(config.model, name) for name in OVERRIDABLE if name != "size"}
    try:
        return Model.override(saved.to_dict(), overrides, old)
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def load_weights(model: LanguageModel, path: Path, announce: bool = True) -> None:
    """Copy the weights of a saved model into one of the same architecture, and print a notice if ``announce``.

    Raises:
        UserError: the weights cannot be read, or they do not fit.
    """
    folder = find_model(path)
    weights = find_weights(folder)
    try:
        model.load_state_dict(read_weights(weights, "cpu"))
    except Exception as error:  # each library has its own errors
        raise UserError(f"{weights}: cannot be read: {one_line(error)}") from error
    if announce:
        notice(f"starts from the weights in {folder}")


def check_backend(model: ModelConfig, device: torch.device, packed: bool) -> None:
    """Raise unless the operator supports the backend and the chunk size of a model for its heads on a device.

    The check depends on autocast, which must be enabled as for training.

    Args:
        model: the architecture.
        device: the device of the training.
        packed: whether sequences are packed by cu_seqlens.

    Raises:
        UserError: the operator does not support them; the message says why.
    """
    for mixer in model.mixer_counts:
        if mixer != "attention":
            _check_operator(dataclasses.replace(model, mixer=mixer, layers=None), device, packed)


def _check_operator(model: ModelConfig, device: torch.device, packed: bool) -> None:
    """Raise as :func:`check_backend` does, for the operator of ``model.mixer``."""
    steps = 16
    heads = model.mamba_expand * model.d_model // model.mamba_head_dim if model.mixer == "mamba2" else model.num_heads
    q, v = (
        torch.empty(1, steps, count, dim, device=device)
        for count, dim in ((1 if model.mixer == "mamba2" else heads, model.qk_head_dim), (heads, model.head_dim))
    )
    gate = torch.empty(1, steps, heads, device=device)
    options: dict[str, Any] = {"chunk_size": model.chunk_size, "backend": model.backend}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, steps], dtype=torch.int32, device=device)
    try:
        if model.mixer in ("gla", "delta_net", "gated_delta_net", "kda"):
            by_channel = model.mixer in ("gla", "kda")
            log_f = None if model.mixer == "delta_net" else torch.empty_like(q) if by_channel else gate
            explain_delta_rule(q, q, v, gate, log_f, **options)
        else:
            explain(q, q, v, gate, gate, input_gate="exp" if model.mixer == "mlstm_exp" else "sigmoid", **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.{one_line(error)}") from error


def _read(folder: Path) -> ModelConfig:
    """Return the architecture of a saved model; its backend may be missing here and is left out."""
    try:
        return read_config(folder, {"backend": None})
    except (OSError, ValueError) as error:
        raise UserError(f"init_from: {one_line(error)}") from error


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer that is saved with a model, or None."""
    exists = any((folder / name).is_file() for name in (INFO_FILE, TOKENIZER_FILE))
    return load_tokenizer(folder) if exists else None


def _check_model(given: Model, saved: ModelConfig, path: Path) -> None:
    """Raise UserError if an option of the model differs from the saved model."""
    size = {} if given.size is None else {name: getattr(SIZES[given.size], name) for name in ("d_model", "num_blocks")}
    fields = {
        name: value
        for name, value in dataclasses.asdict(given).items()
        if name not in OVERRIDABLE and value is not None
    }
    for name, value in (*size.items(), *fields.items()):
        if getattr(saved, name) != value:
            raise UserError(f"model.{name}: got {value!r}, expected {getattr(saved, name)!r}, which {path} has")


def _check_tokenizer(config: TrainConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise UserError if the tokenizer differs from the one that is saved with a model."""
    saved_tokenizer = _tokenizer(folder)
    if saved_tokenizer is None:
        notice(
            f"{folder}: no tokenizer beside the model; {config.data.tokenizer} is taken for the one it was made with"
        )
    elif tokenizer.vocabulary() != saved_tokenizer.vocabulary() or tokenizer.bos != saved_tokenizer.bos:
        raise UserError(
            f"data.tokenizer: got {config.data.tokenizer}, whose tokens are not those of {config.init_from}; "
            "leave it out to take the tokenizer that is saved with the model"
        )
