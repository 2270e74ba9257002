"""The functions that switch transformers' xLSTM to tfla's operator, and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from tfla.integrations.transformers.cell import Cell
from tfla.integrations.transformers.padding import PaddingHooks


def find_backbones(model: nn.Module) -> list[Any]:
    """Return the modules of class xLSTMModel in the model."""
    from transformers import xLSTMModel

    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, xLSTMModel)]


def check_kernel(backbone: Any) -> None:
    """Raise a ValueError where the config names a kernel that does not compute mLSTMexp."""
    kernel = str(backbone.config.chunkwise_kernel)
    if "siging" in kernel:
        raise ValueError(f"chunkwise_kernel: got {kernel!r} in the model's config, expected one of mLSTMexp")


def accelerate_backbone(backbone: Any, chunk_size: int | None, backend: str | None) -> None:
    """Make the layers of an xLSTMModel compute with :func:`tfla.mlstm`, with these options of the operator."""
    padding = PaddingHooks()
    for layer in _layers(backbone):
        layer.mlstm_backend = Cell(layer.mlstm_backend, padding, chunk_size, backend)
    padding.attach(backbone)


def restore_backbone(backbone: Any) -> None:
    """Undo :func:`accelerate_backbone`; a backbone that was not accelerated stays as it is."""
    cells = {layer: cell for layer in _layers(backbone) if isinstance(cell := layer.mlstm_backend, Cell)}
    for padding in {cell.padding for cell in cells.values()}:
        padding.detach(backbone)
    for layer, cell in cells.items():
        (layer.mlstm_backend,) = cell.original_in_tuple


def _layers(backbone: Any) -> list[Any]:
    """Return the layers that have an ``mlstm_backend``, not wrappers that pass the attribute on."""
    return [module for module in backbone.modules() if "mlstm_backend" in dict(module.named_children())]
