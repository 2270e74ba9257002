"""Turning models to this library's operator, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from tfla.backends import BACKENDS
from tfla.integrations.transformers.cell import Cell
from tfla.integrations.transformers.padding import PaddingHooks
from tfla.ops.checks import check_chunk_size

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model, *, chunk_size: int | None = None, backend: str | None = None) -> Model:
    """Run every xLSTM of transformers inside the model on :func:`tfla.mlstm`; weights and config stay as they are.

    Training, prefill and generation, with and without a cache, go through it; sequences may have any length, and
    padding by ``attention_mask``, on either side, gives every row the result it has alone. In eval mode a new cache is
    in the config's ``inference_state_dtype``. A model that was accelerated before takes the new options.

    Args:
        model: an ``xLSTMForCausalLM``, an ``xLSTMModel`` or a module around one.
        chunk_size: distance in steps between the states stored for the backward; None lets the operator choose.
        backend: of the operator; None lets it choose.

    Returns:
        The same model.

    Raises:
        TypeError: there is no xLSTM in the model.
        ValueError: it is configured for kernels of another form than mLSTMexp, chunk_size is below 1, or there is no
            such backend.
        ImportError: transformers is not installed.
    """
    check_chunk_size(chunk_size)
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend: got {backend!r}, expected None or one of {', '.join(map(repr, BACKENDS))}")
    backbones = _backbones(model)
    for backbone in backbones:
        kernel = str(backbone.config.chunkwise_kernel)
        if "siging" in kernel:
            raise ValueError(f"chunkwise_kernel: got {kernel!r} in the model's config, expected one of mLSTMexp")
    restore(model)
    for backbone in backbones:
        padding = PaddingHooks()
        for block in backbone.blocks:
            layer = block.mlstm_layer
            layer.mlstm_backend = Cell(layer.mlstm_backend, padding, chunk_size, backend)
        padding.attach(backbone)
    return model


def restore(model: Model) -> Model:
    """Undo :func:`accelerate`; a model that was not accelerated stays as it is. Returns the same model.

    Raises:
        TypeError: there is no xLSTM in the model.
        ImportError: transformers is not installed.
    """
    for backbone in _backbones(model):
        cells = {
            block.mlstm_layer: cell
            for block in backbone.blocks
            if isinstance(cell := block.mlstm_layer.mlstm_backend, Cell)
        }
        for padding in {cell.padding for cell in cells.values()}:
            padding.detach(backbone)
        for layer, cell in cells.items():
            (layer.mlstm_backend,) = cell.original_in_tuple
    return model


def _backbones(model: nn.Module) -> list[Any]:
    try:
        from transformers import xLSTMModel
    except ImportError as error:
        raise ImportError('this needs transformers: pip install "tfla[transformers]"') from error
    found = (
        [module for module in model.modules() if isinstance(module, xLSTMModel)] if isinstance(model, nn.Module) else []
    )
    if not found:
        raise TypeError(f"model: got {type(model).__name__}, expected an xLSTMForCausalLM or a module with one")
    return found
