"""The activations of log-gates and write strengths, and their derivatives, as kernels of Triton and Gluon call them.

f is the pre-activation of a log-gate or of a write strength, z = f + b, and g the result of one of two activations,
whose numbers follow (1) of :mod:`tfla.backends.triton.activation_kernels`:

    softplus:  g = -a softplus(z)                               dz = -a sigmoid(z) dg                         (2)
    sigmoid:   g = factor s,  s = sigmoid(a z)                  dz = factor a s (1 - s) dg                    (3)

where a = exp(A_log) is a number for each head, b = dt_bias one for each head or for each of its channels, and factor a
constant: the lower bound of log-gates, and 1 or 2 for write strengths, which have a = 1 and b = 0. Then df = dz, the
gradient of dt_bias sums dz over the steps, and that of A_log sums g dg in (2) and z dz in (3).

NaN stays NaN. The arithmetic is in float32. Kernels clamp the log-gates that these functions return. With PTX the
functions take approximate instructions of NVIDIA GPUs, a power of 2 for exp and a reciprocal for a division; each has a
relative error of at most 2^-22.
"""

import triton
import triton.language as tl


@triton.jit
def exp_of_negative(z, PTX: tl.constexpr = False):
    """Return exp(-|z|), which is at most 1, so that nothing overflows."""
    if PTX:
        x = tl.abs(z) * -1.4426950408889634
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp(-tl.abs(z))


@triton.jit
def divide(x, y, PTX: tl.constexpr = False):
    """Return x / y."""
    if PTX:
        return x * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    else:
        return x / y


@triton.jit
def softplus(z, PTX: tl.constexpr = False):
    """Return log(1 + exp(z)) with a small relative error in float32, also where the result is near 0.

    log(1 + e) / e is a polynomial of degree 8 with a relative error of 1.2e-7 for e from 0 to 1, interpolated in
    Chebyshev points. It takes fewer instructions than a logarithm.
    """
    e = exp_of_negative(z, PTX)
    p = -0.02958850748836994 + e * 0.005253457929939032
    p = -0.13674770295619965 + e * (0.07836166769266129 + e * p)
    p = -0.24844369292259216 + e * (0.19111430644989014 + e * p)
    p = -0.49999502301216125 + e * (0.33319270610809326 + e * p)
    return tl.maximum(z, 0.0) + e * (1.0 + e * p)


@triton.jit
def sigmoid(z, PTX: tl.constexpr = False):
    """Return 1 / (1 + exp(-z)) with a small relative error in float32, also where the result is near 0."""
    e = exp_of_negative(z, PTX)
    return divide(tl.where(z >= 0.0, 1.0, e), 1.0 + e, PTX)


@triton.jit
def activated_gate(z, a, factor, SOFTPLUS: tl.constexpr, PTX: tl.constexpr = False):
    """Return g by equation (2) with SOFTPLUS, else by (3)."""
    if SOFTPLUS:
        return -a * softplus(z, PTX)
    else:
        return factor * sigmoid(a * z, PTX)


@triton.jit
def gate_derivatives(z, a, factor, SOFTPLUS: tl.constexpr, PTX: tl.constexpr = False):
    """Return g, its derivative with respect to z, and the one with respect to A_log."""
    g = activated_gate(z, a, factor, SOFTPLUS, PTX)
    if SOFTPLUS:
        return g, -a * sigmoid(z, PTX), g
    else:
        other = sigmoid(-a * z, PTX)  # 1 - s without cancellation
        return g, g * other * a, g * other * (a * z)


@triton.jit
def load_activation(
    A_log, Bias, h, c, rate_stride, bias_h, bias_c, DK: tl.constexpr, HAS_RATE: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Load the parameters of the activation of gates for head h: a, a number, and b, in the shape of c.

    Args:
        A_log: (H), with the stride rate_stride; read with HAS_RATE, else a is 1.
        Bias: dt_bias, (H, DK) with the strides bias_h and bias_c; read with HAS_BIAS, else b is 0.
        h: the head.
        c: the channels.
    """
    a = 1.0
    if HAS_RATE:
        a = tl.exp(tl.load(A_log + h * rate_stride).to(tl.float32))
    b = 0.0
    if HAS_BIAS:
        b = tl.load(Bias + (h * bias_h + c * bias_c), c < DK, 0.0).to(tl.float32)
    return a, b
