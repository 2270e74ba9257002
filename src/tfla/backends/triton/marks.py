"""Marks: steps before which the fused backward keeps the state and its cotangent.

There dlog_f, a running sum, starts again from <C, dC>, without the rounding that has added up (docs/design.md).
"""

APART = {2: 1024, 4: 4096}  # steps between them, by bytes of an input
# Without a normaliser rounding adds up faster: at 1,024 steps dlog_f has up to 2.5 times the error of rounded inputs,
# at 256 1.2 times. Those of the Hopper walks are further apart: they are bound by bytes, and marks are bytes.
CLOSER = 256
SMALL = 8192  # elements of a state that costs little to keep
CLOSE = 64  # steps between those of rounded inputs then: sums of dlog_f, like the gradient of Mamba-2's A, need them


def steps_between(dqk: int, dhv: int, itemsize: int, kept: int | None = None, closer: bool = False) -> int:
    """Steps between marks of heads with dqk and dhv, inputs having `itemsize` bytes; kept: elements of a state as it
    is kept, where zeros fill it up; between marks of a small one the longer of its inputs then has about as many.
    closer: of rounded inputs at most CLOSER."""
    if itemsize != 2 or (kept or dqk * dhv) > SMALL:
        return min(CLOSER, APART[itemsize]) if closer and itemsize == 2 else APART[itemsize]
    return CLOSE * max(1, (kept or 0) // (CLOSE * max(dqk, dhv)))
