"""The distance of state checkpoints: steps at which the fused backward stores the state C and its cotangent dC.

At a checkpoint dlog_f, a running sum over steps, starts again from <C, dC>, free of the rounding errors that the sum
has accumulated (docs/mathematics.md, and docs/tuning-log-mlstm.md for the measured errors).
"""

from __future__ import annotations

import math

from torch import Tensor

from tfla.backends.gpu.context import LaunchContext

# Steps between two checkpoints, by bytes of an input element. For float32 this is the minimum.
CHECKPOINT_STEPS = {2: 1024, 4: 128}
# Steps between two checkpoints of Triton kernels without a normalizer, for states of at most CLOSER_STATE elements.
# Larger states have the same number of checkpoint bytes per step. The Hopper kernels are bound by bytes and use
# CHECKPOINT_STEPS.
CLOSER_STEPS, CLOSER_STATE = 256, 128 * 256
SMALL_STATE = 8192  # elements of a state that is cheap to store
# Steps between two checkpoints of small states with 16-bit inputs. Sums of dlog_f, like the gradient of Mamba-2's A,
# need them.
SMALL_STATE_STEPS = 64


def checkpoint_interval(dqk: int, dhv: int, itemsize: int, kept: int | None = None, closer: bool = False) -> int:
    """Return the number of steps between two checkpoints.

    In float32 the running sum accumulates about as much rounding over 128 steps as dlog_f itself has. The float32 scans
    are bound by arithmetic, so checkpoints cost little time. With 2 dqk steps between them the checkpoints of C and dC
    fit into the memory of dv.

    Args:
        dqk: the dim of q and k of a head.
        dhv: the dim of v of a head.
        itemsize: bytes of an element of q, k and v.
        kept: the number of elements of a stored state, where it is padded. For small states a checkpoint is then about
            as large as the larger of the inputs between two checkpoints.
        closer: whether 16-bit inputs use CLOSER_STEPS.
    """
    size = kept or dqk * dhv
    if itemsize == 4:
        return max(CHECKPOINT_STEPS[4], 2 << (dqk - 1).bit_length())
    if size > SMALL_STATE:
        factor = 1 << max(0, (size // CLOSER_STATE).bit_length() - 1)  # a power of two
        return min(CLOSER_STEPS * factor, CHECKPOINT_STEPS[2]) if closer else CHECKPOINT_STEPS[2]
    return SMALL_STATE_STEPS * max(1, (kept or 0) // (SMALL_STATE_STEPS * max(dqk, dhv)))


def checkpoint_shape(ctx: LaunchContext) -> tuple[int, int, int, int]:
    """Return the shape of the checkpoints of C, (checkpoints, H, K, V)."""
    inside = min(ctx.segment_steps, ctx.T) > ctx.checkpoint_steps  # segments have steps that are checkpoints
    return ctx.B * ctx.T // ctx.checkpoint_steps if inside else 0, ctx.H, ctx.K, ctx.V


def new_checkpoints(
    ctx: LaunchContext, unused: Tensor, memory: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Allocate checkpoints of C, (checkpoints, H, K, V), and of n, (checkpoints, H, K), or of dC and dn.

    Args:
        ctx: The context of the call.
        unused: Stands for the checkpoints of n without a normalizer.
        memory: A dense tensor in the dtype of q whose memory holds C where it is large enough, or None.
        offset: Elements of `memory` that are in use.
    """
    shape = checkpoint_shape(ctx)
    size = math.prod(shape)
    if memory is not None and 0 < size <= memory.numel() - offset:
        C = ctx.recorder.reuse(memory, offset, shape)
    else:
        C = ctx.new(*shape, dtype=ctx.x.q.dtype)
    return C, ctx.new(shape[0], ctx.H, ctx.K) if ctx.spec.normalize else unused
