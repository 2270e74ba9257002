"""The functions that switch models of transformers to tfla's operators, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from tfla.backends import BACKENDS
from tfla.integrations.transformers import xlstm
from tfla.integrations.transformers.rebind import check_forward, reset_forward, set_forward
from tfla.integrations.transformers.recurrences import LAYERS, REFUSED, forward_of
from tfla.ops.checks import check_chunk_size

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model, *, chunk_size: int | None = None, backend: str | None = None) -> Model:
    """Make the recurrent layers of a model of transformers compute with tfla's operators.

    Layers of mLSTM, Mamba-2, Gated DeltaNet, Kimi Delta Attention and Lightning Attention do so; docs/transformers.md
    lists the models. Training, prefill and generation use it, with and without a cache. The weights and the config stay
    as they are. For a model that was accelerated before, the new options replace the old ones.

    xLSTM takes sequences of any length. With an ``attention_mask``, padding on either side gives every row the result
    that it has alone. In eval mode a new cache has the config's ``inference_state_dtype``.

    Args:
        model: a model of transformers, or a module that contains one.
        chunk_size: for xLSTM, the number of steps between the states that are stored for the backward; None lets the
            operator choose.
        backend: for xLSTM, the backend of the operator; None lets the operator choose.

    Returns:
        The same model. One that is refused stays as it was, accelerated or not.

    Raises:
        TypeError: the model contains no layer of these recurrences, or also one of another recurrence, or `chunk_size`
            is not an int.
        ValueError: a config names a kernel that does not compute mLSTMexp, `chunk_size` is below 1, there is no such
            backend, the model takes neither option, another program has replaced the forward of a layer, or a layer
            is of a version of transformers in which the table does not find what it replaces.
        ImportError: transformers is not installed.
    """
    check_chunk_size(chunk_size)
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend: got {backend!r}, expected None or one of {', '.join(map(repr, BACKENDS))}")
    backbones, layers = _find(model)
    for backbone in backbones:
        xlstm.check_kernel(backbone)
    options = {"chunk_size": chunk_size, "backend": backend}
    for name, layer in layers.items():
        for option, value in options.items():
            if value is not None:
                raise ValueError(
                    f"{option}: got {value!r} for a model with {name} ({type(layer).__name__}), expected None; xLSTM"
                    " alone takes it"
                )
    for name, layer in layers.items():
        _check_layer(name, layer)
        check_forward(layer)
    restore(model)  # from here on nothing is refused, which would leave a part of the layers switched
    for layer in layers.values():
        set_forward(layer, forward_of)
    for backbone in backbones:
        xlstm.accelerate_backbone(backbone, chunk_size, backend)
    return model


def restore(model: Model) -> Model:
    """Undo :func:`accelerate`; a model that was not accelerated stays as it is.

    Returns:
        The same model.

    Raises:
        TypeError: the model contains no layer that :func:`accelerate` takes, or also one of another recurrence.
        ImportError: transformers is not installed.
    """
    backbones, layers = _find(model)
    for backbone in backbones:
        xlstm.restore_backbone(backbone)
    for layer in layers.values():
        reset_forward(layer)
    return model


def _find(model: nn.Module) -> tuple[list[Any], dict[str, nn.Module]]:
    """Return the xLSTM backbones and, by name, the layers of other recurrences, or raise a TypeError."""
    try:
        backbones = xlstm.find_backbones(model)
    except ImportError as error:
        raise ImportError('this needs transformers: pip install "tfla[transformers]"') from error
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    for name, module in modules.items():
        if (reason := REFUSED.get(type(module).__name__)) is not None:
            raise TypeError(
                f"model: got {type(model).__name__}, whose {name} is a {type(module).__name__}: {reason}; expected"
                " mLSTM, Mamba-2, Gated DeltaNet, Kimi Delta Attention or Lightning Attention"
            )
    layers = {name: module for name, module in modules.items() if type(module).__name__ in LAYERS}
    if not backbones and not layers:
        raise TypeError(
            f"model: got {type(model).__name__}, expected an xLSTMForCausalLM or a module with one, or with one of"
            f" {', '.join(LAYERS)}"
        )
    return backbones, layers


def _check_layer(name: str, layer: nn.Module) -> None:
    """Raise a ValueError for a layer whose forward cannot be replaced."""
    import transformers

    recurrence = LAYERS[type(layer).__name__]
    if not type(layer).__module__.startswith("transformers.models."):
        raise ValueError(
            f"model: got {name} of class {type(layer).__module__}.{type(layer).__name__}, expected the class of this"
            " name in transformers.models"
        )
    try:
        forward_of(layer)
    except LookupError as error:
        raise ValueError(
            f"model: got {name} ({type(layer).__name__}) of transformers {transformers.__version__}, whose forward does"
            f" not call {error.args[0]}, expected to replace {', '.join((*recurrence.functions, *recurrence.wrappers))}"
        ) from None
