"""The functions that switch models with modules of xlstm and mlstm_kernels to tfla's operator, and back.

Modules are recognized by the names of their classes, so that neither package is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from tfla.integrations.mlstm_kernels.torch.backend_module import mLSTMBackend
from tfla.integrations.xlstm.functions import parallel_stabilized_simple, recurrent_step_stabilized_simple

Model = TypeVar("Model", bound=nn.Module)
BACKEND = ("mlstm_kernels.torch.backend_module", "mLSTMBackend")
CELL = ("xlstm.blocks.mlstm.cell", "mLSTMCell")
# By attribute of a cell: the function that takes the place of the function of that name in CELL_FUNCTIONS.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "backend_fn": parallel_stabilized_simple,
    "backend_fn_step": recurrent_step_stabilized_simple,
}
CELL_FUNCTIONS = "xlstm.blocks.mlstm.backends"


def accelerate(model: Model) -> Model:
    """Make all mLSTMs of xlstm, and all backend modules of mlstm_kernels, in the model compute with tfla's operator.

    These are every ``mLSTMCell`` in the layers of ``xLSTMBlockStack`` and ``xLSTMLMModel``, and every ``mLSTMBackend``,
    that of ``xLSTMLarge`` and of other models. Weights, configs, classes, hooks and the names of modules stay as they
    are, and a backend module goes on reading its config. Outputs, states and gradients are those of the function that
    the model had, for the kernels of mlstm_kernels those of the kernel that the config names; sequences may have any
    length. A second call has no effect.

    Args:
        model: any module.

    Returns:
        The same model.

    Raises:
        TypeError: the model is no module or has no such parts.
        ValueError: a part computes something else than its class does; the message names the part, and the model stays
            as it is.
    """
    parts = _find(model)
    replaced = [(module, _replacements(name, module)) for name, module in parts]
    for module, attributes in replaced:
        for attribute, function in attributes.items():
            setattr(module, attribute, function)
    return model


def restore(model: Model) -> Model:
    """Undo :func:`accelerate`; parts that were not accelerated stay as they are.

    Returns:
        The same model.

    Raises:
        TypeError: the model is no module or has no such parts.
    """
    for _, module in _find(model):
        if not _is_accelerated(module):
            continue
        if _class_of(module, BACKEND) is None:
            for attribute, function in FUNCTIONS.items():
                setattr(module, attribute, getattr(sys.modules[CELL_FUNCTIONS], function.__name__))
        else:
            del module.forward
    return model


def _class_of(module: nn.Module, name: tuple[str, str]) -> type | None:
    """Return the class of this module name and class name among those of `module`, or None."""
    return next((c for c in type(module).__mro__ if (c.__module__, c.__qualname__) == name), None)


def _find(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of the model that :func:`accelerate` switches, each with its name in the model."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    parts = [(name, module) for name, module in named if _class_of(module, BACKEND) or _class_of(module, CELL)]
    if not parts:
        raise TypeError(
            f"model: got {type(model).__name__}, expected a module with an mLSTMCell of xlstm or an mLSTMBackend of "
            "mlstm_kernels"
        )
    return parts


def _is_accelerated(module: nn.Module) -> bool:
    """Return whether a part computes with tfla."""
    if _class_of(module, BACKEND) is None:
        return all(getattr(module, attribute) is function for attribute, function in FUNCTIONS.items())
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), mLSTMBackend)


def _replacements(name: str, module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the attributes of a part that :func:`accelerate` sets, with their values.

    Raises:
        ValueError: the part does not compute what its class in the package does, or its config names a kernel that
            there is not.
    """
    if _is_accelerated(module):
        return {}
    kind, where = type(module).__name__, name or "model"
    backend = _class_of(module, BACKEND)
    if backend is not None:
        if "forward" in vars(module) or type(module).forward is not backend.forward:  # type: ignore[attr-defined]
            raise ValueError(f"{where}: got a {kind} with a forward of its own, expected that of {'.'.join(BACKEND)}")
        try:
            return {"forward": mLSTMBackend(module.config).forward}  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{where}.config: {error}") from error
    for attribute, function in FUNCTIONS.items():
        given = getattr(module, attribute)
        found = f"{getattr(given, '__module__', None)}.{getattr(given, '__qualname__', given)}"
        if found != f"{CELL_FUNCTIONS}.{function.__name__}":
            raise ValueError(f"{where}.{attribute}: got {found}, expected {CELL_FUNCTIONS}.{function.__name__}")
    return FUNCTIONS
