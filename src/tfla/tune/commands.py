"""The command `tfla tune`."""

from __future__ import annotations

from collections.abc import Sequence


def tune(args: Sequence[str]) -> int:
    """``tfla tune``; returns the exit code."""
    import tyro

    from tfla.tune.run import TuneConfig, run

    run(tyro.cli(TuneConfig, args=args, prog="tfla tune"))
    return 0
