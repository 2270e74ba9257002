"""Marks: steps before which the fused backward keeps the state and its cotangent.

There dlog_f, a running sum, starts again from <C, dC>, without the rounding that has added up (docs/mathematics.md).
"""

APART = {2: 1024, 4: 4096}  # steps between them, by bytes of an input
# Without a normaliser rounding adds up faster: at 1,024 steps dlog_f has up to 2.5 times the error of rounded inputs,
# at 256 1.2 times. Those of the Hopper walks are further apart: they are bound by bytes, and marks are bytes.
CLOSER, OF_CLOSER = 256, 128 * 256  # of states with up to so many elements, of larger ones as many bytes for each step
SMALL = 8192  # elements of a state that costs little to keep
CLOSE = 64  # steps between those of rounded inputs then: sums of dlog_f, like the gradient of Mamba-2's A, need them


def steps_between(dqk: int, dhv: int, itemsize: int, kept: int | None = None, closer: bool = False) -> int:
    """Steps between marks of heads with dqk and dhv, inputs having `itemsize` bytes; kept: elements of a state as it
    is kept, where zeros fill it up; between marks of a small one the longer of its inputs then has about as many.
    closer: of rounded inputs as CLOSER says."""
    size = kept or dqk * dhv
    if itemsize != 2 or size > SMALL:
        times = 1 << max(0, (size // OF_CLOSER).bit_length() - 1)  # a power of two
        return min(CLOSER * times, APART[itemsize]) if closer and itemsize == 2 else APART[itemsize]
    return CLOSE * max(1, (kept or 0) // (CLOSE * max(dqk, dhv)))
