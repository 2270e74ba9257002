"""Saving and loading of models: a directory with config.json and model.safetensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfla._util.device import check_device
from tfla._util.files import write_atomically
from tfla.nn.config import ModelConfig
from tfla.nn.validation import check_weights_dtype

if TYPE_CHECKING:
    from types import ModuleType

    from tfla.nn.model import LanguageModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DISTRIBUTED = ".metadata"  # of a checkpoint of torch.distributed.checkpoint, whose model is under the key "model"


def save(model: LanguageModel, directory: str | Path) -> None:
    """Write a model into a directory, as :meth:`LanguageModel.save_pretrained` says."""
    safetensors = import_safetensors()
    directory = Path(directory)
    check_holds_no_run(directory)
    tensors = tensors_to_save(model)
    if any(hasattr(t, "full_tensor") for t in model.parameters()) and torch.distributed.get_rank():
        return  # the first process writes
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model.config.to_dict(), indent=2) + "\n"
    write_atomically(
        directory / WEIGHTS, lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    )
    write_atomically(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def check_holds_no_run(directory: Path) -> None:
    """Raise ValueError where a directory has a config.json that is no model's, which saving a model would replace."""
    path = directory / CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:  # broken, so that nothing is lost; errors of JSON and of Unicode are ValueErrors
        return
    if isinstance(fields, dict) and not fields.keys() & {"d_model", "model_type"}:
        raise ValueError(
            f"directory: got {directory}, whose {CONFIG} is no model's but, for instance, that of a run of `tfla "
            "train`; expected another directory"
        )


def tensors_to_save(model: LanguageModel) -> dict[str, Tensor]:
    """Return the parameters of a model by name as a file has them: whole, contiguous, and each in memory of its own."""
    tensors = {name: _whole(t.detach()).contiguous() for name, t in model.state_dict().items()}
    if model.unembedding.weight is model.embedding.weight:
        tensors["unembedding.weight"] = tensors["unembedding.weight"].clone()
    return tensors


def load(
    cls: type[LanguageModel],
    directory: str | Path,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    overrides: dict[str, Any],
) -> LanguageModel:
    """Load a model from a directory, as :meth:`LanguageModel.from_pretrained` says."""
    check_weights_dtype(dtype)
    device = check_device("cpu" if device is None else device)
    config_path, weights_path = Path(directory) / CONFIG, find_weights(Path(directory))
    config = read_config(Path(directory), overrides)
    _need_file(weights_path)
    tensors = read_weights(weights_path, device)
    return build_model(cls, config, tensors, dtype, f"{weights_path}: its tensors do not fit {config_path}")


def read_config(directory: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Return the config of a saved model, with some fields replaced.

    Raises:
        FileNotFoundError: the directory has no config.json.
        ValueError: config.json is broken or describes another kind of model.
    """
    path = directory / CONFIG
    _need_file(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"got a JSON {type(fields).__name__}, expected an object")
        if "model_type" in fields:
            raise ValueError(_other_layout(fields["model_type"]))
        return ModelConfig.from_dict(fields, overrides)
    except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(f"{path}: {error}") from error


def read_tensors(path: Path, device: torch.device | str | None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; ValueError if the file is broken."""
    safetensors = import_safetensors()
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path, device=str(device or "cpu"))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file: {error}") from error
    return tensors


def find_weights(directory: Path) -> Path:
    """Return the file that tells where the weights of a saved model are: those of WEIGHTS, or of a checkpoint of DCP.

    The file need not exist.
    """
    distributed = directory / DISTRIBUTED
    return distributed if distributed.is_file() and not (directory / WEIGHTS).is_file() else directory / WEIGHTS


def read_weights(path: Path, device: torch.device | str | None) -> dict[str, Tensor]:
    """Return the weights of a model by name, from a file that :func:`find_weights` returns.

    A checkpoint that several processes have written is read by this one alone.

    Raises:
        ValueError: a file is broken or missing.
    """
    if path.name != DISTRIBUTED:
        return read_tensors(path, device)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = "model."
    try:
        entries = dcp.FileSystemReader(path.parent).read_metadata().state_dict_metadata
        tensors = {
            name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device=device or "cpu")
            for name, entry in entries.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        load_alone({"model": tensors}, path.parent)
    except BaseException as error:  # a CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{path.parent}: not a complete checkpoint: {error}") from error
    return tensors


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """Load a checkpoint that several processes have written into the tensors of ``state``, by this process alone."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # PyTorch 2.13 warns that it assumes a single process also where it is told so.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def build_model(
    cls: type[LanguageModel], config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype | None, misfit: str
) -> LanguageModel:
    """Build a model whose parameters are the given tensors.

    Args:
        cls: the class of the model.
        config: its architecture.
        tensors: its parameters by name; they are used without a copy.
        dtype: dtype of the parameters; None leaves it.
        misfit: start of the error message if the tensors do not fit the config.

    Raises:
        ValueError: the tensors do not fit the config.
    """
    with torch.device("meta"):  # the initial weights would be replaced at once
        model = cls(config)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{misfit}: {error}") from error
    return model.to(dtype=dtype)


def import_safetensors() -> ModuleType:
    """Return the module safetensors, or raise an ImportError that says how to install it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('saving and loading models needs safetensors: pip install "tfla[train]"') from error
    return safetensors


def _whole(x: Tensor) -> Tensor:
    """Return a tensor without its distribution; every process has to call this."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # a DTensor


def _need_file(path: Path) -> None:
    """Raise FileNotFoundError unless ``path`` is a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected what save_pretrained writes, {CONFIG} and {WEIGHTS}")


def _other_layout(model_type: object) -> str:
    """Return the error message for a config.json of the library transformers."""
    got = (
        f"got a config of transformers with model_type {model_type!r}, expected what save_pretrained of tfla.nn writes"
    )
    if model_type == "xlstm":
        got += "; tfla.integrations.transformers.load_xlstm loads it (xLSTM-7B's layout)"
    if model_type == "tfla":
        got += "; tfla.integrations.transformers.TflaForCausalLM.from_pretrained(...).to_language_model() loads it"
    return got
