"""The Hopper backend of the delta rule: X and scans for h, dv, dq and dk in Gluon, other kernels those of Triton.

With gates by channel the kernels in Gluon are the scans, where registers hold a state, and for tiles that need no
levels those of operands, X, and the gradients of q, k, beta and gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.backends.base import FinalRows, Replay
from tfla.backends.delta import DeltaGrads, DeltaInputs, DeltaOutputs, DeltaSpec, DeltaStepInputs
from tfla.backends.triton.delta_backend import BY_SEGMENTS, TritonDelta

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext, ChannelKernels
    from tfla.backends.triton.delta import ForwardKernels
    from tfla.backends.triton.delta_segments import BackwardKernels
    from tfla.backends.triton.delta_segments import ForwardKernels as SegmentKernels

DTYPES = (torch.bfloat16, torch.float16)  # float16 in the simulator alone
ALIGNMENT = 16  # bytes, of addresses that TMA takes
SMALLEST_DIM, LARGEST_DQK, LARGEST_DHV = 64, 128, 256
LARGEST_BY_CHANNEL = 256, 4096  # dqk and dhv with a gate for each channel


def _for_descriptors(x: DeltaInputs) -> DeltaInputs:
    """Return inputs with copies of those tensors that TMA reads whose address it cannot take, or the same inputs.

    The address is not known where a backend is chosen for a traced call.
    """
    copies = {
        name: t.clone(memory_format=torch.contiguous_format)
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("log_f", x.log_f if x.channel_gates else None))
        if t is not None and t.data_ptr() % ALIGNMENT
    }
    return x._replace(**copies) if copies else x


def channel_kernels(ctx: ChannelContext) -> ChannelKernels:
    """Return the kernels in Gluon that take the call, and for the rest those of Triton."""
    from tfla.backends.hopper import channel_dv, channel_gradients, channel_h, channel_operands, channel_states
    from tfla.backends.triton.channel_rule import ChannelKernels

    kernels = ChannelKernels(
        operands=channel_operands.launch if channel_operands.supports(ctx) else None,
        gradients=channel_gradients.launch if channel_gradients.supports(ctx) else None,
    )
    if not channel_states.supports(ctx):
        return kernels
    return kernels._replace(h=channel_h.launch, dv=channel_dv.launch, programs=channel_states.grid(ctx)[0])


def forward_kernels() -> ForwardKernels:
    """Return the launchers of a forward."""
    from tfla.backends.hopper import delta_h, delta_solve
    from tfla.backends.triton import delta

    return delta.ForwardKernels(solve=delta_solve.launch, h=delta_h.launch, by_channel=channel_kernels)


class HopperDelta(TritonDelta):
    """The backend of :mod:`.delta_h`, :mod:`.delta_backward` and the kernels for gates by channel.

    A forward stores what Triton's does.
    """

    name = "hopper"
    priority = 20
    reads_before_decay = False

    def __init__(self, device_unsupported: Callable[[Tensor], str | None], aligned: Callable[[Tensor], bool]) -> None:
        super().__init__(device_unsupported)
        self._aligned = aligned

    def unsupported(self, x: DeltaInputs) -> str | None:
        """Return why the backend cannot run these inputs, or None."""
        if why := super().unsupported(x):
            return why
        if x.q.dtype not in DTYPES:
            return f"it takes bfloat16, the inputs are {x.q.dtype}"
        if x.q.shape[0] == 0:
            return "it takes no empty batch"
        if x.read_key is not None and not x.channel_gates:
            return "it takes a read key with gates by channel alone"
        dqk, dhv = x.q.shape[3], x.v.shape[3]
        most_dqk, most_dhv = LARGEST_BY_CHANNEL if x.channel_gates else (LARGEST_DQK, LARGEST_DHV)
        fits = SMALLEST_DIM <= dqk <= most_dqk and SMALLEST_DIM <= dhv <= most_dhv
        if not fits or dqk % 8 or dhv % 8:  # TMA needs rows that are multiples of 16 bytes
            return (
                f"it takes multiples of 8, dqk from {SMALLEST_DIM} to {most_dqk} and dhv from {SMALLEST_DIM} to "
                f"{most_dhv}"
            )
        read = [x.q, x.k, x.v]
        if x.channel_gates and x.log_f is not None:
            if x.log_f.dtype not in (x.q.dtype, torch.float32):
                return f"it takes gates by channel in the dtype of q or in float32, log_f is {x.log_f.dtype}"
            if x.log_f.stride(3) != 1:
                return "it needs gates whose channels are next to each other"
            read.append(x.log_f)
        if not all(map(self._aligned, read)):
            return "it needs strides that are multiples of 16 bytes"
        return None

    def programs(self, x: DeltaInputs) -> tuple[int, int]:
        """Return the programs of whole sequences in a scan, and those that a GPU runs at a time.

        The scans of a backward are launched for 128 columns of dhv at a time.
        """
        from tfla.backends.gpu.config import processors

        return x.v.shape[0] * x.v.shape[2], processors(x.q.device)

    def normalizes(self, x: DeltaInputs, spec: DeltaSpec) -> bool:
        """Return whether the kernels divide q and k by their norms, as those with at most one gate a step do."""
        from tfla.backends.triton import delta

        if delta.takes_channel_kernels(x, spec):
            return self.activates(x, spec)
        return True

    def activates(self, x: DeltaInputs, spec: DeltaSpec) -> bool:
        """Return whether the kernels apply the activation of the gates, which have one gate for each channel then.

        They also divide q and k by their norms, for which a program has to hold all of their channels at once.
        """
        from tfla.backends.hopper import channel_operands

        plain = x.channel_gates and x.read_key is None and not spec.read_before_decay
        whole_keys = channel_operands.LARGEST_NARROW_HEAD < x.q.shape[3] <= channel_operands.WIDTH.value
        return plain and whole_keys and x.q.dtype == torch.bfloat16

    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        """Compute h, and what the options ask for."""
        return self.run_forward(_for_descriptors(x), spec, forward_kernels())

    def forward_by_rows(
        self, x: DeltaInputs, rows: Tensor, spec: DeltaSpec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h, and read and overwrite rows of the pool x.C inside the scans; None where these cannot."""
        return self.run_forward_by_rows(_for_descriptors(x), rows, spec, forward_kernels(), final_rows)

    def segment_kernels(self) -> SegmentKernels:
        """Return the launchers of a forward in segments, and of the transitions of whole sequences."""
        from tfla.backends.hopper import delta_action, delta_h, delta_solve
        from tfla.backends.triton import delta_segments

        return delta_segments.ForwardKernels(delta_solve.launch, delta_action.launch, delta_h.launch)

    def segment_gradients(self) -> BackwardKernels:
        """Return the launchers of a backward in segments."""
        from tfla.backends.hopper import delta_backward
        from tfla.backends.triton import delta_segments

        return delta_segments.BackwardKernels(delta_backward.backward, delta_backward.initial_cotangent)

    def action(self, x: DeltaInputs, spec: DeltaSpec) -> tuple[Tensor, Tensor] | None:
        """Compute the transitions of sequences, and what these add to the state, by a scan without outputs."""
        return super().action(_for_descriptors(x), spec)

    def forward_replay(self, x: DeltaInputs, spec: DeltaSpec) -> Replay | None:
        """Return a function that replays the last `forward` on other inputs of the same signature, or None."""
        from tfla.backends.triton import delta

        if spec.kernel == BY_SEGMENTS or _for_descriptors(x) is not x:
            return None
        return delta.forward_replay(x, spec, forward_kernels())

    def backward(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec) -> DeltaGrads:
        """Compute the gradients from the cotangents of h and of the final state."""
        from tfla.backends.hopper import delta_backward
        from tfla.backends.triton import delta

        x, dh = _for_descriptors(x), self._cotangent(dh)
        if spec.kernel == BY_SEGMENTS and len(x.v):
            return super().backward(x, out, dh, dC, spec)
        return delta.run_backward(x, out, dh, dC, spec, delta_backward.backward, channel_kernels)

    def initial_cotangent(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, spec: DeltaSpec) -> Tensor:
        """Compute the cotangents of the initial states by one scan of the backward."""
        from tfla.backends.hopper import delta_backward
        from tfla.backends.triton import delta

        if delta.takes_channel_kernels(x, spec):
            return super().initial_cotangent(x, out, dh, spec)
        return delta.run_initial_cotangent(
            _for_descriptors(x), out, self._cotangent(dh), spec, delta_backward.initial_cotangent
        )

    def _cotangent(self, dh: Tensor) -> Tensor:
        """Return the cotangent of h as TMA can read it, which may be a copy."""
        if self._aligned(dh) and not dh.data_ptr() % ALIGNMENT:
            return dh
        return dh.clone(memory_format=torch.contiguous_format)

    def steps_unsupported(self, x: DeltaStepInputs) -> str | None:
        """Return why the backend cannot run these steps, or None."""
        return "it has no kernel for single steps"
