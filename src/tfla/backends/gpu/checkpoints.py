"""Marks: steps before which the fused backward keeps the state and its cotangent.

There dlog_f, a running sum, starts again from <C, dC>, without the rounding that has added up (docs/mathematics.md).
"""

APART = {2: 1024, 4: 128}  # steps between them, by bytes of an input; in float32 at least
# Without a normaliser rounding adds up faster: at 1,024 steps dlog_f has up to 2.5 times the error of rounded inputs,
# at 256 1.2 times. Those of the Hopper walks are further apart: they are bound by bytes, and marks are bytes.
CLOSER, OF_CLOSER = 256, 128 * 256  # of states with up to so many elements, of larger ones as many bytes for each step
SMALL = 8192  # elements of a state that costs little to keep
CLOSE = 64  # steps between those of rounded inputs then: sums of dlog_f, like the gradient of Mamba-2's A, need them


def steps_between(dqk: int, dhv: int, itemsize: int, kept: int | None = None, closer: bool = False) -> int:
    """Steps between marks of heads with dqk and dhv, inputs having `itemsize` bytes; kept: elements of a state as it
    is kept, where zeros fill it up; between marks of a small one the longer of its inputs then has about as many.
    closer: of rounded inputs as CLOSER says.

    In float32 the running sum gathers about as much rounding over 128 steps as dlog_f itself has. Its walks are bound
    by arithmetic, so marks cost little time; with 2 dqk steps between them those of C and dC fit into the memory of dv.
    """
    size = kept or dqk * dhv
    if itemsize == 4:
        return max(APART[4], 2 << (dqk - 1).bit_length())
    if size > SMALL:
        times = 1 << max(0, (size // OF_CLOSER).bit_length() - 1)  # a power of two
        return min(CLOSER * times, APART[2]) if closer else APART[2]
    return CLOSE * max(1, (kept or 0) // (CLOSE * max(dqk, dhv)))
