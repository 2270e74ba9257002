"""Decoding with a state that stays where it is: for generation, and for serving requests that come and go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tfla.nn import fused_step
from tfla.nn.arguments import check_ids
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.states import check_model_state
from tfla.ops.state import State


def check_graph(cuda_graph: object, constant: bool, device: torch.device) -> None:
    """Raise where a graph is asked for that cannot be captured: of a growing state, or on another device than a GPU."""
    if cuda_graph is not None and not isinstance(cuda_graph, bool):
        raise TypeError(f"cuda_graph: got {cuda_graph!r}, expected None, True or False")
    if cuda_graph and not (constant and device.type == "cuda"):
        why = f"a model on {device.type}" if constant else "attention, whose cache grows"
        raise ValueError(f"cuda_graph: got True with {why}, expected an mLSTM on a GPU")


class Decoder:
    """A batch of sequences that advance together, one token each; on an NVIDIA GPU by replaying a CUDA graph.

    The places of the batch can be given to other sequences between steps: :meth:`scatter`, :meth:`gather` and
    :meth:`reset` work on single ones. No gradients are kept.

    Args:
        model: the model. A graph reads its weights where they are when it is captured.
        state: of as many sequences as the batch has, from :meth:`LanguageModel.initial_state` or a prompt; copied.
        cuda_graph: None captures one where that can be done: on a GPU, with an mLSTM.

    Raises:
        TypeError, ValueError: the state is not one of this model; the message names the block and what is expected.
        ValueError: a graph was asked for where none can be captured.
    """

    def __init__(self, model: LanguageModel, state: ModelState, *, cuda_graph: bool | None = None) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "initial_state"):
            raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel")
        self.model = model
        device = model.embedding.weight.device
        self.batch = check_model_state(model, state)
        constant = all(isinstance(part, State) for part in state)
        check_graph(cuda_graph, constant, device)
        self.state: ModelState = tuple(part.clone() if isinstance(part, State) else part for part in state)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda" and constant and cuda_graph is not False:
            self._capture(len(self._parts()[0].C), device)
            for mine, given in zip(self._parts(), state, strict=True):  # what capturing has written over
                for to, source in zip(mine, given, strict=True):
                    if to is not None and source is not None:
                        to.copy_(source)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (B, vocab_size) behind tokens ids (B,) int64; with a graph the next step overwrites them.

        Raises:
            ValueError, TypeError: ids do not fit; the message names them, what they are and what is allowed.
        """
        check_ids(ids, "(B,)", 1)
        if len(ids) != self.batch:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected ({self.batch},): one for each sequence")
        if self._graph is None:
            logits, self.state = self.model.step(ids, self.state)
            return logits
        self._ids.copy_(ids)
        self._graph.replay()
        return self._logits

    def gather(self, rows: Tensor | Sequence[int]) -> ModelState:
        """A copy of the states of some sequences; see :meth:`tfla.State.gather`."""
        return tuple(part.gather(rows) for part in self._parts())

    def scatter(self, rows: Tensor | Sequence[int], state: ModelState) -> None:
        """Puts other sequences in the places of some; see :meth:`tfla.State.scatter`."""
        parts = self._parts()
        check_model_state(self.model, state)
        for mine, theirs in zip(parts, state, strict=True):
            mine.scatter(rows, theirs)  # type: ignore[arg-type]

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Puts some sequences before their first token; see :meth:`tfla.State.reset`."""
        for part in self._parts():
            part.reset(rows)

    def _parts(self) -> list[State]:
        """The blocks' states.

        Raises:
            TypeError: a block is attention.
        """
        parts = [part for part in self.state if isinstance(part, State)]
        if len(parts) < len(self.state):
            raise TypeError("state: got attention's cache, whose sequences have one length; expected that of an mLSTM")
        return parts

    def _advance(self) -> Tensor:
        """One step in place, n and m included."""
        if self._fused is None:
            logits, new = self.model.step(self._ids, self.state, in_place=True)
        else:
            logits, new = self._fused(self._ids, self.state)
        kept, fresh = ([t for part in parts for t in part[1:] if t is not None] for parts in (self.state, new))
        if kept:
            torch._foreach_copy_(kept, fresh)
        return logits

    @torch.no_grad()
    def _capture(self, batch: int, device: torch.device) -> None:
        self._ids = torch.zeros(batch, dtype=torch.int64, device=device)
        one = fused_step.unsupported(self.model, self.state) is None
        self._fused = fused_step.FusedStep(self.model) if one else None
        # A cache of cast weights would be filled while capturing and emptied before the replay.
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.cuda.device(device), torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._advance()  # compiles and allocates what must not be captured
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._advance()
