"""The backends, modules of this package.

The object ``BACKEND`` of a module computes the mLSTM and scalar-gated linear attention (:mod:`tfla.backends.base`), its
``DELTA_BACKEND`` the delta rule and gates for each key channel (:mod:`tfla.backends.delta`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from tfla.backends.base import Backend, Inputs, StepInputs
from tfla.backends.delta import DeltaBackend, DeltaInputs, DeltaStepInputs

B = TypeVar("B", Backend, DeltaBackend)
_MODULES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]


def _load(attribute: str) -> dict[str, Any]:
    """Return the backends of all modules under this attribute by name, the highest priority first."""
    found = [getattr(module, attribute) for module in _MODULES if hasattr(module, attribute)]
    return {b.name: b for b in sorted(found, key=lambda b: -b.priority)}


BACKENDS: dict[str, Backend] = _load("BACKEND")
DELTA_BACKENDS: dict[str, DeltaBackend] = _load("DELTA_BACKEND")


def _named(name: object, backends: Mapping[str, B]) -> B:
    """Return the backend of that name.

    Raises:
        ValueError: no backend has that name.
    """
    if not isinstance(name, str) or name not in backends:
        raise ValueError(f"backend: got {name!r}, allowed are None and {', '.join(map(repr, backends))}")
    return backends[name]


def select(name: str | None, x: Any, backends: Mapping[str, B]) -> B:
    """Return the backend of that name, or for None the one of the highest priority that supports these inputs.

    Raises:
        ValueError: no backend has that name, or it cannot run these inputs (the message says why).
    """
    if name is None:
        best: B | None = None
        for backend in backends.values():  # a loop, since torch.compile has no max with a key
            if backend.unsupported(x) is None and (best is None or backend.priority > best.priority):
                best = backend
        assert best is not None, "the reference supports all inputs"
        return best
    named = _named(name, backends)
    why = named.unsupported(x)
    if why is not None:
        raise ValueError(f"backend: {name!r} cannot run these inputs: {why}")
    return named


def select_steps(name: str | None, x: Any, backends: Mapping[str, B]) -> B | None:
    """Return the backend whose kernel computes these steps, or None where none has such a kernel.

    With a name only that backend is considered, without one the backend of the highest priority.

    Raises:
        ValueError: no backend has that name.
    """
    if name is not None:
        _named(name, backends)
    best: B | None = None
    for backend in backends.values():  # a loop, since torch.compile has no max with a key
        takes = name in (None, backend.name) and backend.steps_unsupported(x) is None
        if takes and (best is None or backend.priority > best.priority):
            best = backend
    return best


__all__ = [
    "BACKENDS",
    "DELTA_BACKENDS",
    "Backend",
    "DeltaBackend",
    "DeltaInputs",
    "DeltaStepInputs",
    "Inputs",
    "StepInputs",
    "select",
    "select_steps",
]
