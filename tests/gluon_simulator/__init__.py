"""The simulator of the Hopper kernels on a CPU, which checks results and the synchronization of shared memory.

Triton's interpreter does not run Gluon. The simulator imports the modules of the kernels a second time, with
:mod:`.language` in place of Triton's language, and runs the kernels as Python functions. Partitions are threads, one of
which runs at a time in random order (:mod:`.program`). Asynchronous operations are computed at once, but their results
may only be used after a wait. Each access of shared memory is compared with the earlier ones by vector clocks
(:mod:`.clocks`), so that a missing wait, arrival, fence or barrier is found in any order of execution. An access
outside of a tensor is an error.

Layouts, registers and what the compiler adds between the warps of a partition are not simulated.
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
    """Let the modules of these names be imported again, with the simulator's language in place of Triton's."""
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
    """Return modules of kernels that run on the CPU, by name.

    Args:
        names: The modules. They have been imported, and a module stands after those that it imports.
        files: The files to read instead of the modules' own, by name.
    """
    with _instead(names):
        return {name: _imported(name, (files or {}).get(name)) for name in names}
