"""The functions that make a program written for flash-linear-attention compute with tfla, and undo that."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tfla.integrations.arguments import drop_unknown

Function = Callable[..., Any]

MODULES = (
    "comba",
    "delta_rule",
    "gated_delta_product",
    "gated_delta_rule",
    "generalized_delta_rule",
    "gla",
    "kda",
    "lightning_attn",
    "linear_attn",
    "retention",
    "rwkv7",
    "simple_gla",
)
DECORATOR = "use_kernel_func_from_hub_with_fallback"  # by which models of transformers find functions of the package


class Replacements:
    """The functions that are replaced while a program runs on tfla, each with the one that it had before."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Function, Function]] = []  # the original and what replaces it

    def add(self, original: Function, replacement: Function) -> None:
        """Replace a function in every loaded module that has it under any name."""
        self.pairs.append((original, replacement))

    def apply(self) -> None:
        """Replace the originals in all loaded modules."""
        _exchange({id(a): b for a, b in self.pairs})

    def undo(self) -> None:
        """Put the originals back, also into modules that were loaded since."""
        _exchange({id(b): a for a, b in self.pairs})
        self.pairs.clear()


_REPLACEMENTS = Replacements()


def patch() -> None:
    """Make programs that were written for flash-linear-attention, or for models of transformers, compute with tfla.

    In every module that is loaded, the package's functions that this module has are replaced by those, whatever names
    they were imported by; modules that are imported later find them in the package. Models of transformers that would
    call the package, or their own slow functions where it is not installed, call tfla too. An argument that tfla does
    not support is an error that names it. A second call has no effect before :func:`restore`.

    Raises:
        ImportError: neither flash-linear-attention nor transformers is installed.
    """
    if _REPLACEMENTS.pairs:
        return
    if not any(map(importlib.util.find_spec, ("fla", "transformers"))):
        raise ImportError("this needs flash-linear-attention or transformers: pip install fla-core")
    try:
        _add_functions()
    except BaseException:
        _REPLACEMENTS.pairs.clear()  # nothing is patched, and a later call tries again
        raise
    _REPLACEMENTS.apply()


def restore() -> None:
    """Undo :func:`patch`; without one it has no effect."""
    _REPLACEMENTS.undo()


def _add_functions() -> None:
    """Add the functions of the package and of models of transformers to those that are replaced."""
    own = _own_functions()
    if importlib.util.find_spec("fla") is not None:
        for name, (module, function) in own.items():
            original = getattr(importlib.import_module(f"fla.ops.{module}"), name)
            _REPLACEMENTS.add(original, _replacement(function, original))
    if importlib.util.find_spec("transformers") is not None:
        hub = importlib.import_module("transformers.integrations.hub_kernels")
        for model_function, name in list(_functions_of_models(own)):
            _REPLACEMENTS.add(model_function, _replacement(own[name][1], model_function, only_known=True))
        if hasattr(hub, DECORATOR):
            _REPLACEMENTS.add(getattr(hub, DECORATOR), _decorator(getattr(hub, DECORATOR), own))
            getattr(importlib.import_module("transformers.integrations"), DECORATOR)  # binds the lazy attribute


def _own_functions() -> dict[str, tuple[str, Function]]:
    """Return tfla's functions by name, each with the name of its module."""
    found: dict[str, tuple[str, Function]] = {}
    for name in MODULES:
        module = importlib.import_module(f"tfla.integrations.fla.{name}")
        found |= {each: (name, getattr(module, each)) for each in module.__all__}
    return found


def _replacement(function: Function, original: Function, only_known: bool = False) -> Function:
    """Return a function for `original` that calls tfla's; `only_known` drops arguments that this one does not name.

    It is a new function, so that modules that have tfla's function itself keep it when the patch is undone.
    """
    called = drop_unknown(function) if only_known else function

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    return replacement


def _decorator(original: Function, own: dict[str, tuple[str, Function]]) -> Function:
    """Return the decorator of transformers that gives models which are loaded later tfla's functions."""

    @functools.wraps(original)
    def decorator(func_name: str, package: str, *args: Any, **kwargs: Any) -> Function:
        decorate: Function = original(func_name, package, *args, **kwargs)
        if package != "fla" or func_name not in own:
            return decorate

        def decorated(torch_function: Function) -> Function:
            original = decorate(torch_function)
            replacement = _replacement(own[func_name][1], original, only_known=True)
            _REPLACEMENTS.add(original, replacement)
            return replacement

        return decorated

    return decorator


def _functions_of_models(own: dict[str, tuple[str, Function]]) -> Iterator[tuple[Function, str]]:
    """Yield the decorated functions of loaded models of transformers, each with the name of the package's function."""
    functions = {id(f): f for module in _loaded("transformers.models.") for f in vars(module).values() if callable(f)}
    for function in functions.values():
        name = _function_of_package(function)
        if name in own:
            yield function, name


def _function_of_package(function: Function) -> str | None:
    """Return the name of the package's function that a decorated function of transformers calls, or None."""
    while inspect.isfunction(function):
        names = inspect.getclosurevars(function).nonlocals
        if names.get("package") == "fla" and isinstance(names.get("func_name"), str):
            return str(names["func_name"])
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]
    return None


def _loaded(prefix: str = "") -> Iterator[ModuleType]:
    """Yield the loaded modules whose names start so, apart from those of tfla."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(prefix) and name.partition(".")[0] != "tfla":
            yield module


def _exchange(by_id: dict[int, Function]) -> None:
    """Replace objects by identity in the globals of all loaded modules."""
    for module in _loaded():
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
