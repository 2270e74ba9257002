"""The functions that make the forward of a single module call other functions, and undo that."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

Function = Callable[..., Any]


class ReplacedForward:
    """The forward of a single module that a function replaces.

    It is copied and pickled with the module, where a bound method would become that of the class again.

    Args:
        module: the module.
        find: returns the function, of the module and its inputs, for a module of this class.
    """

    def __init__(self, module: nn.Module, find: Callable[[nn.Module], Function]) -> None:
        self.__self__, self.find = module, find
        self.__func__ = find(module)
        self.__name__ = "forward"
        self.__signature__ = inspect.signature(MethodType(self.__func__, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again: the module and what finds the function, which has no name to be found by."""
        return _replaced_again, (self.__self__, self.find)


def _replaced_again(module: nn.Module, find: Callable[[nn.Module], Function]) -> Function:
    """Return the forward of a copy of a module, or its class's with a warning where there is nothing to replace."""
    try:
        return ReplacedForward(module, find)
    except LookupError as error:
        warnings.warn(
            f"accelerate: a copied {type(module).__name__} computes with transformers again, whose forward does not"
            f" call {error.args[0]}",
            stacklevel=2,
        )
        return MethodType(type(module).forward, module)


def check_forward(module: nn.Module) -> None:
    """Raise a ValueError where another program has replaced the forward of the module."""
    current = vars(module).get(_name_of_forward(module))
    if (
        current is None
        or isinstance(current, ReplacedForward)
        or getattr(current, "__func__", None) is type(module).forward
    ):
        return
    raise ValueError(
        f"model: got a {type(module).__name__} whose forward another program has replaced, expected its class's"
    )


def set_forward(module: nn.Module, find: Callable[[nn.Module], Function]) -> None:
    """Make what `find` returns, a function of the module and its inputs, the forward of this module alone.

    :func:`check_forward` says whether that would undo what another program has done.
    """
    setattr(module, _name_of_forward(module), ReplacedForward(module, find))


def reset_forward(module: nn.Module) -> None:
    """Give the module the forward of its class again, if :func:`set_forward` has replaced it."""
    name = _name_of_forward(module)
    if not isinstance(vars(module).get(name), ReplacedForward):
        return
    if name == "forward":
        del module.forward
    else:
        setattr(module, name, MethodType(type(module).forward, module))


def with_functions(function: Function, functions: Mapping[str, Callable[[Function], Function]]) -> Function:
    """Return a copy of `function` in which some of the global names that it calls stand for other functions.

    Args:
        function: a function, or a wrapper that has it as ``__wrapped__`` and in its closure.
        functions: by global name, what makes the replacement from the original.

    Raises:
        LookupError: the function does not call a function of one of these names.
    """
    original = getattr(function, "__wrapped__", None)
    if original is not None:
        cells = function.__closure__ or ()
        inner = with_functions(original, functions)
        closure = tuple(CellType(inner) if cell.cell_contents is original else cell for cell in cells)
        return _copy(function, function.__globals__, closure)
    scope = function.__globals__
    for name in functions:
        if name not in function.__code__.co_names or not callable(scope.get(name)):
            raise LookupError(name)
    replaced = {name: make(scope[name]) for name, make in functions.items()}
    # torch.compile looks globals up in the module of this name, which has the original functions.
    return _copy(function, {k: v for k, v in scope.items() if k != "__name__"} | replaced, function.__closure__)


def _copy(function: Any, scope: dict[str, Any], closure: tuple[CellType, ...] | None) -> Function:
    """Return a copy of a function with other globals and another closure."""
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    copy.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return copy


def _name_of_forward(module: nn.Module) -> str:
    """Return the attribute that has the module's forward, which hooks of the package accelerate put elsewhere."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"
