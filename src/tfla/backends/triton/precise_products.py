"""Matrix products for operands whose rounding would cost more than that of inputs and outputs.

docs/tuning-log-delta.md has what each rounding of the delta rule costs. These are the means, from the cheapest on:

    nearest_tf32        MMAs cut an operand off to the bits of tf32; rounded before, it has half of the error, no bias
    scaled_product      float16 has 3 more bits than bfloat16, and the range where each row is scaled by its maximum
    add_split_product   one more MMA for an operand as the sum of two 16-bit numbers
"""

import triton
import triton.language as tl


@triton.jit
def nearest_tf32(x, PRECISION: tl.constexpr):
    """Return float32 values x, where products in PRECISION are tf32 rounded to the nearest tf32.

    A NaN may become 0: kernels that round operands have to keep the NaN of an input by another term.
    """
    if PRECISION == "tf32":
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def as_operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return float32 values x as an operand of this dtype, rounded before the MMA.

    Other sums of the same operand then have the numbers that the MMA multiplies.
    """
    if dtype == tl.float32:
        return nearest_tf32(x, PRECISION)
    else:
        return x.to(dtype)


@triton.jit
def scaled_product(a, b, PRECISION: tl.constexpr):
    """Return a b for float32 a, (M, K), and b, (K, N); for float16 b the rows of a are scaled to the range of float16.

    The factors are powers of two, and the largest number of a row gets the exponent 14: float16 then loses what is
    below 2^-38 of that number.
    """
    if b.dtype == tl.float16:
        exponent = tl.max(tl.abs(a), 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.maximum(exponent, 15 << 23)
        down = ((254 << 23) - exponent + (14 << 23)).to(tl.float32, bitcast=True)
        up = (exponent - (14 << 23)).to(tl.float32, bitcast=True)
        return tl.dot((a * down[:, None]).to(tl.float16), b) * up[:, None]
    else:
        return tl.dot(a.to(b.dtype), b, input_precision=PRECISION)


@triton.jit
def split(x, dtype: tl.constexpr):
    """Return float32 values x as two numbers of a 16-bit dtype: x rounded, and the rounding error."""
    if dtype == tl.bfloat16:
        # Rounded in integers: two numbers are converted by one instruction, and only where the result is not used again
        high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(tl.float32)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def add_split_product(total, a, b, PRECISION: tl.constexpr):
    """Return total + a b for float32 a, which for 16-bit b is split into two numbers of the dtype of b."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:
        high, low = split(a, b.dtype)
        return tl.dot(low, b, tl.dot(high, b, total))
