"""The description of a failed measurement."""

from __future__ import annotations

import torch


def describe_error(error: Exception) -> str:
    """Return the type and the first line of an error, at most 200 characters; "out of memory" for that of a GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].rstrip(": ")
