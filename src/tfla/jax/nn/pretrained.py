"""Saving and loading of models on JAX: the files of :mod:`tfla.nn.pretrained`, config.json and model.safetensors.

Weights of linear layers are (out, in) in the file, as in PyTorch, and (in, out) in modules of flax.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax import Array

from tfla._util.files import write_atomically
from tfla.nn.pretrained import CONFIG, WEIGHTS, check_holds_no_run, read_config

if TYPE_CHECKING:
    from types import ModuleType

    from tfla.jax.nn.model import LanguageModel

LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # names of weights in the file


def stored_name(path: tuple[Any, ...]) -> str:
    """Return the name in the file of a weight, from its path in the module: names of modules and of the weight."""
    *modules, leaf = map(str, path)
    return ".".join([*modules, LEAVES.get(leaf, leaf)])


def turned(path: tuple[Any, ...], x: Array) -> Array:
    """Return a weight of a file as the module has it, or the other way round: kernels of linear layers transposed."""
    return x.T if path[-1] == "kernel" else x


def save(model: LanguageModel, directory: str | Path) -> None:
    """Write a model into a directory, as :meth:`LanguageModel.save_pretrained` says."""
    safetensors = import_safetensors()
    directory = Path(directory)
    check_holds_no_run(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {stored_name(path): turned(path, variable[...]) for path, variable in nnx.to_flat_state(nnx.state(model))}
    text = json.dumps(model.config.to_dict(), indent=2) + "\n"
    write_atomically(
        directory / WEIGHTS, lambda path: safetensors.flax.save_file(weights, path, metadata={"format": "pt"})
    )
    write_atomically(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def load(
    cls: type[LanguageModel], directory: str | Path, dtype: Any, param_dtype: Any, overrides: dict[str, Any]
) -> LanguageModel:
    """Load a model from a directory, as :meth:`LanguageModel.from_pretrained` says."""
    config = read_config(Path(directory), overrides)
    weights_path = Path(directory) / WEIGHTS
    if not weights_path.is_file():
        raise FileNotFoundError(f"{weights_path}: no such file; expected what save_pretrained writes")
    safetensors = import_safetensors()
    try:
        stored = safetensors.flax.load_file(weights_path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{weights_path}: not a complete safetensors file: {error}") from error
    misfit = f"{weights_path}: its arrays do not fit {Path(directory) / CONFIG}"
    if param_dtype is None:
        param_dtype = next(iter(stored.values())).dtype if stored else None
    abstract = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    missing = sorted({stored_name(path) for path in flat} - set(stored))
    unknown = sorted(set(stored) - {stored_name(path) for path in flat})
    if missing or unknown:
        raise ValueError(f"{misfit}: missing are {missing}, unknown are {unknown}")
    for path, variable in flat.items():
        x = turned(path, stored[stored_name(path)])
        if x.shape != variable.shape:
            raise ValueError(f"{misfit}: {stored_name(path)}: got shape {x.shape}, expected {variable.shape}")
        flat[path] = variable.replace(x.astype(param_dtype))
    model: LanguageModel = nnx.merge(graph, nnx.from_flat_state(flat))
    return model


def import_safetensors() -> ModuleType:
    """Return the module safetensors, or raise an ImportError that says how to install it."""
    try:
        import safetensors.flax
    except ImportError as error:
        raise ImportError('saving and loading models needs safetensors: pip install "tfla[jax]"') from error
    return safetensors
