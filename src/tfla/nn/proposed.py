"""A batch of sequences of which a few proposed tokens are verified and some accepted, by CUDA graphs on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.nn.decode import copy_into, own_state
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.validation import check_model_state


class ProposedSteps:
    """A batch whose state stays at fixed addresses while proposed tokens are verified and some of them accepted.

    No gradients are recorded.

    Args:
        model: the model. Graphs read its weights at the addresses that they have now.
        state: the state of the batch. It is copied.
        count: the number of tokens of a call, from 1 to 32.
        capacity: the number of tokens of a sequence for which caches of attention have room.
        cuda_graph: whether to capture CUDA graphs; None captures on a GPU.
    """

    def __init__(
        self, model: LanguageModel, state: ModelState, count: int, *, capacity: int, cuda_graph: bool | None = None
    ) -> None:
        self.model = model
        self.batch = check_model_state(model, state)
        self.state: ModelState = tuple(own_state(block_state, capacity) for block_state in state)
        device = model.embedding.weight.device
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        if device.type == "cuda" and cuda_graph is not False:
            self._capture(device, count)

    @torch.no_grad()
    def verify(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocab_size) of tokens ids (B, T); with CUDA graphs the next call overwrites them."""
        if self.graphs is None:
            logits, self._accept = self.model.steps(ids, self.state, in_place=True)
            return logits
        self.ids.copy_(ids)
        self.graphs[0].replay()
        return self.logits

    @torch.no_grad()
    def accept(self, lengths: Tensor) -> None:
        """Advance each sequence by the first lengths (B,) of the tokens that have been verified last."""
        if self.graphs is None:
            self.state = self._accept(lengths)
            return
        self.lengths.copy_(lengths)
        self.graphs[1].replay()

    @torch.no_grad()
    def _capture(self, device: torch.device, count: int) -> None:
        """Capture a graph that verifies tokens, and one that accepts some of them.

        No token is accepted meanwhile, which leaves the state as it is.
        """
        batch = self.batch
        self.ids = torch.zeros(batch, count, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

        def accept() -> None:
            copy_into(self.state, self._accept(self.lengths))

        verifying, accepting = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.cuda.device(device), torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compilation and allocations must not be captured
                self.logits, self._accept = self.model.steps(self.ids, self.state, in_place=True)
                accept()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(verifying):
                self.logits, self._accept = self.model.steps(self.ids, self.state, in_place=True)
            with torch.cuda.graph(accepting, pool=verifying.pool()):
                accept()
        self.graphs = verifying, accepting
