"""The options of `tfla tune`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tfla._util.options import check_count, check_range, require
from tfla.measure.problem import Problem
from tfla.ops.gates import InputGate

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class TuneConfig:
    """Find the kernel and the chunk size for a shape and keep them for calls with chunk_size=None.

    All candidates are predicted; the few that may win are measured, forward and backward together. A shape that has an
    entry is measured again only with --again.
    """

    batch: int = 8
    """Sequences."""
    length: int = 8192
    """Steps of a sequence, T."""
    heads: int = 16
    """Heads of q, k and v."""
    dqk: int = 128
    """Head dimension of q and k."""
    dhv: int = 256
    """Head dimension of v."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of q, k and v."""
    gate: Literal["exp", "sigmoid", "both"] = "exp"
    """The input gate."""
    device: str = "auto"
    """Device; auto is the GPU if there is one."""
    backend: str | None = None
    """Backend; None takes the one that the operator would choose."""
    kernel: str | None = None
    """Kernel, which is tuned for calls that name it; None compares all kernels of the backend."""
    memory_limit: float | None = None
    """GiB that forward and backward may take beyond the inputs."""
    predict: bool = False
    """Predict only; nothing is measured or kept."""
    accelerator: str | None = None
    """Predict for an accelerator that this machine does not have, such as H100."""
    again: bool = False
    """Measure a shape even if it has an entry."""
    repeats: int = 10
    """Samples of each candidate."""
    budget: float = 600.0
    """Seconds that measuring may take. The default is measured first, then the others in the order of their predicted
    times; those for which no time is left are reported. A call that has begun is not interrupted."""
    file: Path | None = None
    """Keep the winners in this file; None: the user's."""

    @property
    def shapes(self) -> list[Problem]:
        """The shape of the options, in a list."""
        return [Problem(self.batch, self.length, self.heads, self.dqk, self.dhv)]

    @property
    def problems(self) -> list[Problem]:
        """The shapes to tune for, without duplicates, in the dtype of the options."""
        return list(dict.fromkeys(replace(p, dtype=self.dtype) for p in self.shapes))

    @property
    def gates(self) -> tuple[InputGate, ...]:
        """The input gates to tune for."""
        return ("exp", "sigmoid") if self.gate == "both" else (self.gate,)

    @property
    def limit(self) -> int | None:
        """Bytes that forward and backward may take beyond the inputs."""
        return None if self.memory_limit is None else int(self.memory_limit * 2**30)

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        for name in ("batch", "length", "heads", "dqk", "dhv", "repeats"):
            check_count(name, getattr(self, name), 1, LARGEST)
        if self.memory_limit is not None:
            check_range("memory-limit", self.memory_limit, 0, LARGEST, with_low=False)
        require(self.budget > 0, "budget", self.budget, "a number above 0, or inf")
