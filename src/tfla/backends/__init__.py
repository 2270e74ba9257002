"""The ways to compute the operator: every module here with a ``BACKEND`` is one (:mod:`tfla.backends.base`)."""

from __future__ import annotations

import importlib
import pkgutil

from tfla.backends.base import Backend, Inputs, StepInputs


def _load() -> dict[str, Backend]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found: list[Backend] = [module.BACKEND for module in modules if hasattr(module, "BACKEND")]
    return {b.name: b for b in sorted(found, key=lambda b: -b.priority)}


BACKENDS = _load()


def select(name: str | None, x: Inputs) -> Backend:
    """The backend of that name, or the best one for these inputs.

    Raises:
        ValueError: no backend has that name, or it cannot run these inputs (the message says why).
    """
    if name is None:
        best: Backend | None = None
        for backend in BACKENDS.values():  # a loop, since torch.compile has no max with a key
            if backend.unsupported(x) is None and (best is None or backend.priority > best.priority):
                best = backend
        assert best is not None, "the reference takes everything"
        return best
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, allowed are None and {', '.join(map(repr, BACKENDS))}")
    why = BACKENDS[name].unsupported(x)
    if why is not None:
        raise ValueError(f"backend: {name!r} cannot run these inputs: {why}")
    return BACKENDS[name]


def select_steps(name: str | None, x: StepInputs) -> Backend | None:
    """Who has a kernel for these steps: the backend of that name, or the best one; None if nobody has.

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


__all__ = ["BACKENDS", "Backend", "Inputs", "StepInputs", "select", "select_steps"]
