"""The backends, modules of this package.

The object ``BACKEND`` of a module computes the mLSTM and scalar-gated linear attention (:mod:`tfla.backends.base`), its
``DELTA_BACKEND`` the delta rule and gates for each key channel (:mod:`tfla.backends.delta`).
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tfla.backends.base import Backend, Inputs, StepInputs
from tfla.backends.delta import DeltaBackend

_MODULES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]


def _load(attribute: str) -> dict[str, Any]:
    """Return the backends of all modules under this attribute by name, the highest priority first."""
    found = [getattr(module, attribute) for module in _MODULES if hasattr(module, attribute)]
    return {b.name: b for b in sorted(found, key=lambda b: -b.priority)}


BACKENDS: dict[str, Backend] = _load("BACKEND")
DELTA_BACKENDS: dict[str, DeltaBackend] = _load("DELTA_BACKEND")


def select(name: str | None, x: Inputs) -> Backend:
    """Return the backend of that name, or for None the one of the highest priority that supports these inputs.

    Raises:
        ValueError: no backend has that name, or it cannot run these inputs (the message says why).
    """
    if name is None:
        best: Backend | None = None
        for backend in BACKENDS.values():  # a loop, since torch.compile has no max with a key
            if backend.unsupported(x) is None and (best is None or backend.priority > best.priority):
                best = backend
        assert best is not None, "the reference supports all inputs"
        return best
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, allowed are None and {', '.join(map(repr, BACKENDS))}")
    why = BACKENDS[name].unsupported(x)
    if why is not None:
        raise ValueError(f"backend: {name!r} cannot run these inputs: {why}")
    return BACKENDS[name]


def select_steps(name: str | None, x: StepInputs) -> Backend | None:
    """Return the backend whose kernel computes these steps, or None where none has such a kernel.

    With a name only that backend is considered, without one the backend of the highest priority.

    Raises:
        ValueError: no backend has that name.
    """
    if name is not None and (not isinstance(name, str) or name not in BACKENDS):
        raise ValueError(f"backend: got {name!r}, allowed are None and {', '.join(map(repr, BACKENDS))}")
    best: Backend | None = None
    for backend in BACKENDS.values():  # a loop, since torch.compile has no max with a key
        takes = name in (None, backend.name) and backend.steps_unsupported(x) is None
        if takes and (best is None or backend.priority > best.priority):
            best = backend
    return best


__all__ = ["BACKENDS", "DELTA_BACKENDS", "Backend", "Inputs", "StepInputs", "select", "select_steps"]
