"""Runs Hopper kernels on a CPU: what they compute, and whether their partitions keep out of each other's way.

Triton's interpreter takes no Gluon. Here a kernel's functions run as the Python that they are, their modules imported
once more with a language of our own for Triton's (:mod:`.language`). Partitions are threads that take turns at random
(:mod:`.program`); what is asynchronous on the GPU is done at once, but may only be used after a wait for it: each
access of shared memory is checked by vector clocks against all before it (:mod:`.clocks`), which finds a missing wait,
arrival, fence or barrier in whatever order things happened. What is outside a tensor is an error.

Not simulated: layouts, registers, and what the compiler adds between the warps of a partition.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from gluon_simulator.language import MODULES

__all__ = ["simulated"]


@contextlib.contextmanager
def _instead(names: Sequence[str]) -> Iterator[None]:
    """While modules of these names, and what Triton they import, are others."""
    kept = {name: sys.modules.pop(name) for name in (*names, *MODULES) if name in sys.modules}
    sys.modules.update(MODULES)
    try:
        yield
    finally:
        for name in (*names, *MODULES):
            sys.modules.pop(name, None)
            package, _, last = name.rpartition(".")
            if package in sys.modules and name not in kept:
                vars(sys.modules[package]).pop(last, None)
        sys.modules.update(kept)
        for name, module in kept.items():
            _set_in_package(name, module)


def _set_in_package(name: str, module: ModuleType) -> None:
    """Let `from package import name` find the module, which looks at the package's attributes first."""
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], last, module)


def _imported(name: str, file: Path | None) -> ModuleType:
    if file is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _set_in_package(name, module)
    return module


def simulated(names: Sequence[str], files: Mapping[str, Path] | None = None) -> dict[str, ModuleType]:
    """Modules of kernels, for the CPU; all that they import from one another has to be among them, before them, and
    imported. files: of those that are to be read from elsewhere."""
    with _instead(names):
        return {name: _imported(name, (files or {}).get(name)) for name in names}
