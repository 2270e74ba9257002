"""The progress bar of a run."""

from __future__ import annotations

import sys

from tqdm import tqdm


class StepBar:
    """A progress bar of steps, with the loss and the speed of the last one and the last held-out bits per byte.

    Args:
        steps: the number of steps of the run.
        done: the number of steps that are done.
        visible: whether to draw it.
    """

    def __init__(self, steps: int, done: int, visible: bool) -> None:
        self._bar = tqdm(
            total=steps, initial=done, unit="step", desc="train", dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 10, disable=not visible,
        )  # fmt: skip
        self._step: dict[str, str] = {}
        self._heldout: dict[str, str] = {}

    def advance(self, loss: float, tokens_per_s: float) -> None:
        """Count a step and show its loss and its speed."""
        self._step = {"loss": f"{loss:.3f}", "tokens/s": f"{tokens_per_s:,.0f}"}
        self._bar.set_postfix(self._step | self._heldout, refresh=False)
        self._bar.update()

    def show_evaluation(self, bits_per_byte: float) -> None:
        """Show the result of an evaluation."""
        self._heldout = {"held-out bits/byte": f"{bits_per_byte:.3f}"}
        self._bar.set_postfix(self._step | self._heldout, refresh=False)

    def close(self) -> None:
        """Draw the bar for the last time."""
        self._bar.close()
