"""The Triton backend of the delta rule, for NVIDIA GPUs from Ampere on. Triton is imported on first use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.backends.base import TILE, FinalRows, Replay
from tfla.backends.delta import (
    DeltaBackend,
    DeltaGrads,
    DeltaInputs,
    DeltaOutputs,
    DeltaSpec,
    DeltaStepInputs,
    DeltaStepSpec,
    Saved,
)
from tfla.backends.gpu import pool_rows
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE, INTERPRETED
from tfla.backends.triton.correction_dtype import correction_dtype

if TYPE_CHECKING:
    from tfla.backends.triton.delta import ForwardKernels
    from tfla.backends.triton.delta_segments import BackwardKernels
    from tfla.backends.triton.delta_segments import ForwardKernels as SegmentKernels

BY_SEGMENTS = "segmented"  # the kernel that computes the segments of a sequence side by side
SEGMENT_TILES = 16  # the fewest tiles of a segment that it chooses
PROGRAMS = 2  # of a multiprocessor

# The cost of segments in steps of a scan of whole sequences, measured on an H200 with 8 to 32 heads.
SCANS = 2.5  # the scan for transitions and the one for h, beside the latter alone
START_STEPS = 384  # the start of a program
PASS_STEPS = 80  # passing the state on from one segment to the next
LAUNCH_STEPS = 1024  # the launches that whole sequences do not need
LARGEST_SHARE = 0.8  # segments are chosen where they take at most this share of the time of whole sequences
LARGEST_STEP_DQK = 1024  # a program of the decoding kernel holds whole columns of the state
LARGEST_DIM = 256  # of dqk, and of dhv with gates by step: a program holds a part of the state with all of that dim


def segment_steps(chunk_size: int) -> int:
    """Return the steps of a segment: whole tiles."""
    return -(-chunk_size // TILE) * TILE


def in_segments(spec: DeltaSpec) -> DeltaSpec:
    """Return the options of a call with the kernel "segmented", whose chunk size is that of whole tiles."""
    return spec._replace(chunk_size=segment_steps(spec.chunk_size))


class TritonDelta(DeltaBackend):
    """The backend of the kernels in :mod:`.delta_kernels`."""

    name = "triton"
    priority = 10
    kernels = ("fused", BY_SEGMENTS)
    read_after_decay = (BY_SEGMENTS,)
    activations_by = "kernels"
    clamps_gates = True
    row_kernels = ("fused", BY_SEGMENTS)
    batch_kernels = (BY_SEGMENTS,)

    def __init__(self, device_unsupported: Callable[[Tensor], str | None]) -> None:
        self._device_unsupported = device_unsupported

    def unsupported(self, x: DeltaInputs) -> str | None:
        """Return why the backend cannot run these inputs, or None."""
        if why := self._device_unsupported(x.q):
            return why
        if x.q.shape[3] > LARGEST_DIM:
            return f"it takes dqk up to {LARGEST_DIM}"
        if x.v.shape[3] > LARGEST_DIM and not x.channel_gates:
            return f"it takes dhv up to {LARGEST_DIM}"
        if x.q.dtype != torch.bfloat16 and not INTERPRETED:
            return f"it takes bfloat16, the inputs are {x.q.dtype}"
        return None

    def default_kernel(self, x: DeltaInputs, chunk_size: int | None) -> str:
        """Return "segmented" where whole sequences leave most of a GPU idle and the caller gives no chunk size.

        A call that is traced for any size takes whole sequences.
        """
        T, whole = x.v.shape[1], self.kernels[0]
        if chunk_size is not None or self.kernel_unsupported(x, BY_SEGMENTS):
            return whole
        if not all(isinstance(n, int) for n in x.v.shape) or not x.v.numel():
            return whole
        programs, available = self.programs(x)
        steps = self.default_chunk_size(x, BY_SEGMENTS)
        segments = -(-T // steps)
        scans = SCANS * -(-programs * segments // available) * (steps + START_STEPS)
        cost = scans + PASS_STEPS * segments + LAUNCH_STEPS
        is_faster = cost <= LARGEST_SHARE * -(-programs // available) * (T + START_STEPS)
        return BY_SEGMENTS if is_faster else whole

    def default_chunk_size(self, x: DeltaInputs, kernel: str) -> int:
        """Return the steps of a segment; the kernel "fused" has none, so that its chunk size has no effect."""
        if kernel != BY_SEGMENTS:
            return DEFERRED_CHUNK_SIZE
        programs, available = self.programs(x)
        segments = max(1, available // max(programs, 1))
        return segment_steps(max(-(-x.v.shape[1] // segments), SEGMENT_TILES * TILE))

    def programs(self, x: DeltaInputs) -> tuple[int, int]:
        """Return the programs of whole sequences in the scans that share dhv, and those that a GPU runs at a time."""
        from tfla.backends.gpu.config import processors

        B, _, H, V = x.v.shape
        return B * H * -(-V // TILE), PROGRAMS * processors(x.q.device)

    def kernel_unsupported(self, x: DeltaInputs, kernel: str) -> str | None:
        """Return why this kernel cannot run inputs that the backend supports, or None."""
        if kernel != BY_SEGMENTS:
            return None
        if x.channel_gates:
            return "it takes one gate a step"
        return None if x.cu_seqlens is None else "it takes no packed sequences, which are short already"

    def saved(self, x: DeltaInputs, correct: bool, chunk_size: int, kernel: str) -> Saved:
        """Return what a forward stores: E, and X in the dtype of corrections."""
        B, T, H, V = x.v.shape
        K, rows = x.q.shape[3], 0
        if kernel == BY_SEGMENTS:  # the states at their starts, then their transitions
            rows = B * -(-T // segment_steps(chunk_size))
        states = (rows, H, K, V + K if rows else V), torch.float32
        if not correct:
            return Saved(((0,), torch.float32), ((0,), torch.float32), states)
        return Saved((tuple(x.v.shape), x.v.dtype), ((B, T, H, TILE), correction_dtype(x)), states)

    def stored(self, x: DeltaInputs, spec: DeltaSpec) -> Saved:
        """Return what a forward with `save` stores; of segments norms follow what is stored without them."""
        found, states = super().stored(x, spec), self.saved(x, spec.correct, spec.chunk_size, spec.kernel).chunk_C
        if spec.kernel != BY_SEGMENTS or found.chunk_C == states:
            return found
        return found._replace(chunk_C=((math.prod(states[0]) + math.prod(found.chunk_C[0]),), torch.float32))

    def stores_whole_batch(self, spec: DeltaSpec) -> bool:
        """Return whether `DeltaOutputs.chunk_C` cannot be divided by batch rows, as that of segments and norms."""
        return spec.kernel == BY_SEGMENTS or spec.normalize_qk

    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        """Compute h, and what the options ask for."""
        return self.run_forward(x, spec, None)

    def forward_by_rows(
        self, x: DeltaInputs, rows: Tensor, spec: DeltaSpec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h, and read and overwrite rows of the pool x.C inside the scans; None where these cannot."""
        return self.run_forward_by_rows(x, rows, spec, None, final_rows)

    def run_forward_by_rows(
        self, x: DeltaInputs, rows: Tensor, spec: DeltaSpec, kernels: ForwardKernels | None,
        final_rows: FinalRows | None,
    ) -> Tensor | None:  # fmt: skip
        """Compute :meth:`forward_by_rows` with other launchers, if they are given."""
        from tfla.backends.triton import delta, delta_segments

        by_segments = spec.kernel == BY_SEGMENTS
        if (x.cu_seqlens is None) != by_segments or not pool_rows.can_be_indexed(x, rows, final_rows):
            return None
        if by_segments:
            return delta_segments.run_forward(x, in_segments(spec), self.segment_kernels(), rows, final_rows).h
        return delta.run_forward(x, spec, kernels or delta.KERNELS, rows.contiguous(), final_rows).h

    def run_forward(self, x: DeltaInputs, spec: DeltaSpec, kernels: ForwardKernels | None) -> DeltaOutputs:
        """Compute the forward with other launchers than those of :mod:`.delta_kernels`, if they are given."""
        from tfla.backends.triton import delta

        if spec.kernel == BY_SEGMENTS and len(x.v):  # an empty batch has no segments
            from tfla.backends.triton import delta_segments

            return delta_segments.run_forward(x, in_segments(spec), self.segment_kernels())
        return delta.run_forward(x, spec, kernels or delta.KERNELS)

    def segment_kernels(self) -> SegmentKernels:
        """Return the launchers of a forward in segments, and of the transitions of whole sequences."""
        from tfla.backends.triton import delta_segments

        return delta_segments.FORWARD

    def segment_gradients(self) -> BackwardKernels:
        """Return the launchers of a backward in segments."""
        from tfla.backends.triton import delta_segments

        return delta_segments.BACKWARD

    def forward_replay(self, x: DeltaInputs, spec: DeltaSpec) -> Replay | None:
        """Return a function that replays the last `forward` on other inputs of the same signature, or None."""
        from tfla.backends.triton import delta

        return None if spec.kernel == BY_SEGMENTS else delta.forward_replay(x, spec)

    def backward(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec) -> DeltaGrads:
        """Compute the gradients from the cotangents of h and of the final state."""
        from tfla.backends.triton import delta

        if spec.kernel == BY_SEGMENTS and len(x.v):
            from tfla.backends.triton import delta_segments

            return delta_segments.run_backward(x, out, dh, dC, in_segments(spec), self.segment_gradients())
        return delta.run_backward(x, out, dh, dC, spec)

    def initial_cotangent(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, spec: DeltaSpec) -> Tensor:
        """Compute the cotangents of the initial states by one scan of the backward."""
        from tfla.backends.triton import delta

        if delta.takes_channel_kernels(x, spec):
            return super().initial_cotangent(x, out, dh, spec)
        return delta.run_initial_cotangent(x, out, dh, spec)

    def action(self, x: DeltaInputs, spec: DeltaSpec) -> tuple[Tensor, Tensor] | None:
        """Compute the transitions of sequences, and what these add to the state, by a scan without outputs."""
        from tfla.backends.triton import delta

        if delta.takes_channel_kernels(x, spec):
            return None
        from tfla.backends.triton import delta_segments

        return delta_segments.run_action(x, spec, self.segment_kernels())

    def steps_unsupported(self, x: DeltaStepInputs) -> str | None:
        """Return why the decoding kernel cannot run these steps, or None."""
        if x.q.device.type != "cuda" and x.C.dtype == torch.bfloat16:
            return "Triton's interpreter takes bfloat16 for integers"
        if x.q.shape[3] > LARGEST_STEP_DQK:
            return f"it takes dqk up to {LARGEST_STEP_DQK}"
        return self._device_unsupported(x.q)

    def steps(self, x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute a few decoding steps in one kernel."""
        from tfla.backends.triton import delta_decode

        return delta_decode.run(x, spec, into)

    def steps_replay(self, x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None, time: bool) -> Replay | None:
        """Return a function that replays the last `steps` on other inputs of the same signature, or None."""
        from tfla.backends.gpu import replay
        from tfla.backends.triton import delta_decode

        return replay.recorded_steps(delta_decode.call_signature(x, spec, into), x.v, time)
