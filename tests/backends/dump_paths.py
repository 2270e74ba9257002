"""Writes the path of q to each kernel that calls launch, one JSON list a launch. Needs no GPU; nothing is computed.

    python tests/backends/dump_paths.py CASE... > paths.txt

CASE is as in every_kernel.py. A list has the case, the kernel, the file of the kernel, and the path: the files of this
library whose functions have been entered and not left when Triton is asked to launch the kernel, in the order of the
calls. Files are named from the package on; a file stands once for all frames in a row.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from dump_launches import run_case, without_gpu
from triton.runtime.jit import JITFunction

import tfla
from tfla._util import caching

PACKAGE = Path(tfla.__file__).parent


def name_of(file: str) -> str | None:
    """Return the file as seen from the package, or None for one that is not part of it."""
    path = Path(file)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def open_files(frame: FrameType | None) -> list[str]:
    """Return the files of the package of all open frames, the outermost first."""
    files = []
    while frame is not None:
        files.append(name_of(frame.f_code.co_filename))
        frame = frame.f_back
    return [file for file, _ in itertools.groupby(file for file in reversed(files) if file is not None)]


def main() -> None:
    without_gpu()
    case = ""

    def launch(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        print(
            json.dumps([case, kernel.__name__, name_of(kernel.fn.__code__.co_filename), open_files(sys._getframe(1))])
        )

    with mock.patch.object(JITFunction, "run", launch):
        for case in sys.argv[1:]:
            caching.clear_caches()
            run_case(case)


if __name__ == "__main__":
    main()
