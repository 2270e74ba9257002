"""The distance of state checkpoints: steps at which the fused backward stores the state C and its cotangent dC.

At a checkpoint dlog_f, a running sum over steps, starts again from <C, dC>, free of the rounding errors that the sum
has accumulated (docs/mathematics.md, and docs/tuning-log.md for the measured errors).
"""

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
