"""The command `tfla tune`."""

from __future__ import annotations

from collections.abc import Sequence


def tune(args: Sequence[str]) -> int:
    """``tfla tune``; returns the exit code."""
    import tyro

    from tfla.tune.config import TuneConfig
    from tfla.tune.run import run

    return run(tyro.cli(TuneConfig, args=args, prog="tfla tune"))
