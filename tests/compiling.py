"""The compilation of kernels for GPUs that need not be present."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("backends") / "compile_for.py"


def cache_name() -> str:
    """Return a name that changes with what is kept of each kernel."""
    return f"triton-{hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:8]}"


def compile_kernels(jobs: Iterable[str], cache: Path) -> list[dict[str, Any]]:
    """Answers of SCRIPT, which says what jobs are, in any order. It compiles what is not in the cache."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), *jobs]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
