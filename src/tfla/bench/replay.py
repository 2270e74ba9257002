"""Calls of benchmarks that a CUDA graph replays, so that the host's time does not count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tfla.nn.decode import capture_graph


class Replay:
    """A call that was captured in a CUDA graph, and that is replayed with the inputs of the capture.

    Args:
        call: the call. It is kept, since the graph reads weights and states at their addresses and owns none of them.
        device: the GPU that it runs on.
        inputs: its inputs, which are kept too.
    """

    def __init__(self, call: Callable[..., Tensor], device: torch.device, *inputs: Tensor) -> None:
        self.call, self.inputs = call, inputs
        self.graph, self.result = capture_graph(lambda: call(*inputs), device)

    def __call__(self, *_: Tensor) -> Tensor:
        """Replay the call and return its result, which the next replay overwrites."""
        self.graph.replay()
        return self.result
