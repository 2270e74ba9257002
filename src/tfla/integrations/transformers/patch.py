"""The functions that switch models of transformers to tfla's operator, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from tfla.backends import BACKENDS
from tfla.integrations.transformers.cell import Cell
from tfla.integrations.transformers.padding import PaddingHooks
from tfla.ops.checks import check_chunk_size

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model, *, chunk_size: int | None = None, backend: str | None = None) -> Model:
    """Make every xLSTM of transformers in the model compute with :func:`tfla.mlstm`.

    Training, prefill and generation use it, with and without a cache. The weights and the config stay as they are.
    Sequences may have any length. With an ``attention_mask``, padding on either side gives every row the result that it
    has alone. In eval mode a new cache has the config's ``inference_state_dtype``. For a model that was accelerated
    before, the new options replace the old ones.

    Args:
        model: an ``xLSTMForCausalLM``, an ``xLSTMModel``, or a module that contains one.
        chunk_size: the number of steps between the states that are stored for the backward; None lets the operator
            choose.
        backend: the backend of the operator; None lets the operator choose.

    Returns:
        The same model.

    Raises:
        TypeError: the model contains no xLSTM, or `chunk_size` is not an int.
        ValueError: the config names a kernel that does not compute mLSTMexp, `chunk_size` is below 1, or there is no
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
    """Undo :func:`accelerate`; a model that was not accelerated stays as it is.

    Returns:
        The same model.

    Raises:
        TypeError: the model contains no xLSTM.
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
    """Return the modules of class xLSTMModel in the model, or raise a TypeError if there is none."""
    try:
        from transformers import xLSTMModel
    except ImportError as error:
        raise ImportError('this needs transformers: pip install "tfla[transformers]"') from error
    backbones = (
        [module for module in model.modules() if isinstance(module, xLSTMModel)] if isinstance(model, nn.Module) else []
    )
    if not backbones:
        raise TypeError(f"model: got {type(model).__name__}, expected an xLSTMForCausalLM or a module with one")
    return backbones
