"""Counts the most memory of a forward and a backward of the delta rule on a Hopper GPU, which need not be there.

    PYTHONPATH=tests python tests/backends/peak_memory.py

It answers with one JSON object: the bytes of each of SHAPES.

The calls run on the CPU with tensors of their true sizes, whose memory nothing touches: kernels are recorded, not run.
What counts is what the replay of a call allocates, which is what PyTorch's allocator counts on a GPU.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import dump_launches
import torch
from test_memory import PeakBytes

import tfla
from tfla.backends import DELTA_BACKENDS
from tfla.backends.gpu import replay

B, T = 8, 8192
# By model: heads, dqk and dhv.
SHAPES = {
    "gdn 16 128 128": (16, 128, 128),
    "gdn 16 128 256": (16, 128, 256),
    "gdn 32 128 128": (32, 128, 128),
    "kda 32 128 128": (32, 128, 128),
    "gla 8 256 512": (8, 256, 512),
}


def record(
    self: replay.LaunchRecorder, kernel: Any, grid: Any, *args: Any, num_warps: int, tunable: bool = False,
    compilation: Any = None, **constants: Any,
) -> None:  # fmt: skip
    """Record a launch that does nothing."""
    count = next((n for n, x in enumerate(args) if isinstance(x, int | float)), len(args))
    self._record(lambda stream, hooks_active, args: None, args[:count], [*args[count:]])


def inputs(model: str, H: int, K: int, V: int) -> list[torch.Tensor]:
    """Return q, k, v, the log-gates and, but for GLA, the write strengths, as `tfla.bench.delta.inputs` draws them."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(B, T, H, *shape, dtype=dtype).requires_grad_()

    gates = new(dtype=torch.float32) if model == "gdn" else new(K)
    return [new(K), new(K), new(V), gates, *[new(dtype=torch.float32)] * (model != "gla")]


def measure(model: str, H: int, K: int, V: int) -> dict[str, int]:
    """Return the peak of forward and backward beyond the inputs, and the bytes of the output and of the gradients."""
    x = inputs(model, H, K, V)
    dh = torch.empty_like(x[2])

    def call() -> tuple[torch.Tensor, ...]:
        q, k, v, gates, *beta = x
        h: Any = (
            tfla.delta_rule(q, k, v, *beta, gates, backend="hopper")
            if beta
            else tfla.linear_attention(q, k, v, gates, backend="hopper")
        )
        return torch.autograd.grad(h, x, dh)

    call()
    memory, run = PeakBytes(*x, dh), replay.RecordedLaunches._run

    def counted(self: replay.RecordedLaunches, given: Any) -> list[torch.Tensor]:
        with memory:  # inside of the operator, which takes another way where such a mode is set
            return run(self, given)

    with mock.patch.object(replay.RecordedLaunches, "_run", counted):
        grads = call()
    return {"peak": memory.peak, "results": dh.nbytes + sum(t.nbytes for t in grads)}


def main() -> None:
    dump_launches.without_gpu()
    for name in ("unsupported", "steps_unsupported"):
        setattr(type(DELTA_BACKENDS["hopper"]), name, lambda self, x: None)
    replay.LaunchRecorder.launch = record  # type: ignore[method-assign]
    replay.direct_allocation = lambda *_, **__: None  # it goes past the mode that counts
    found = {name: measure(name.split()[0], *sizes) for name, sizes in SHAPES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
