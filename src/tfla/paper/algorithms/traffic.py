"""The bytes that each algorithm loads and stores, by part.

Tables 9, 11 and 13 count the forward pass of the paper's algorithms. The backward pass and this library's algorithms
are counted by the same rules; a tensor that a kernel loads twice counts once.
"""

from __future__ import annotations

import sympy as sp

from tfla.backends.gpu.checkpoints import CHECKPOINT_STEPS as STEPS
from tfla.paper.algorithms.symbols import B_C, B_IF, B_QKV, B_VEC, DD, DHV, DQK, Gate, L, Parts, S, T

# Steps between the state checkpoints for the gradients of the gates; those of mLSTMsig's Triton kernels are closer.
CHECKPOINT_STEPS = STEPS[2]
DIMS_PER_SUM = 16  # dims of q dq and k dk that a fused scan sums before it stores them


def state(gate: Gate) -> sp.Expr:
    """Return the bytes of C, and for mLSTMexp of n and m."""
    return (DD + DQK + 1 if gate == "exp" else DD) * B_C


def chunkwise_forward(gate: Gate) -> Parts:
    """Count one chunk (Table 9)."""
    return {
        "states: load": L * (DQK + DHV) * B_QKV + 2 * L * B_IF,
        "states: store": state(gate),
        "outputs: load": L * (2 * DQK + DHV) * B_QKV + 2 * L * B_IF + state(gate),
        "outputs: store": L * DHV * B_QKV + (2 * L * B_C if gate == "exp" else 0),
    }


def chunkwise_backward(gate: Gate) -> Parts:
    """Count one chunk: cotangents of states, then kernels for dq, dk and dv, which also load n and m of each step."""
    rows = 2 * L * B_IF + state(gate) + (2 * L * B_C if gate == "exp" else 0)
    denominator = 2 * L * DHV * B_QKV if gate == "exp" else sp.Integer(0)  # h and dh
    return {
        "cotangents of states": L * (DQK + DHV) * B_QKV + rows,
        "dq": L * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dk": L * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dv": L * (2 * DQK + 2 * DHV) * B_QKV + rows,
        "gates": denominator + 2 * L * B_IF + 4 * L * B_C,  # sums of q dq and k dk, stored and loaded
    }


def parallel_forward(gate: Gate) -> Parts:
    """Count a sequence (Table 11)."""
    return {
        "load": T * (2 * DQK + DHV) * B_QKV + 2 * T * B_IF,
        "store": T * DHV * B_QKV + (2 * T * B_C if gate == "exp" else 0),
    }


def parallel_backward(gate: Gate) -> Parts:
    """Count a sequence: a kernel for dq and one for dk and dv, as in attention."""
    rows = 2 * T * B_IF + (2 * T * B_C if gate == "exp" else 0)
    denominator = 2 * T * DHV * B_QKV if gate == "exp" else sp.Integer(0)
    return {
        "dq": T * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dk and dv": T * (3 * DQK + 3 * DHV) * B_QKV + rows,
        "gates": denominator + 2 * T * B_IF + 4 * T * B_C,
    }


def recurrent_forward(gate: Gate) -> Parts:
    """Count one step (Table 13)."""
    return {
        "load": (2 * DQK + DHV) * B_QKV + 2 * B_IF + state(gate),
        "store": DHV * B_QKV + state(gate),
    }


def recurrent_backward(gate: Gate) -> Parts:
    """Count one step: the state is loaded, the cotangent of the state is loaded and stored."""
    return {
        "load": (2 * DQK + (3 if gate == "exp" else 2) * DHV) * B_QKV + 2 * B_IF + 2 * state(gate),
        "store": (2 * DQK + DHV) * B_QKV + 2 * B_IF + state(gate),
    }


def _vectors(gate: Gate) -> sp.Expr:
    """Return the bytes of a tile's gate vectors: rows and columns of the gate matrix, weights, and the decay."""
    return (6 if gate == "exp" else 5) * L * B_VEC


def fused_forward(gate: Gate) -> Parts:
    """Count one tile."""
    return {
        "gates": 2 * L * B_IF + _vectors(gate),
        "load": L * (2 * DQK + DHV) * B_QKV + _vectors(gate),
        "store": L * DHV * B_QKV + (L * B_C if gate == "exp" else 0),
    }


def fused_backward(gate: Gate) -> Parts:
    """Count one tile. The scans for dq and dk store sums for the gates, and state checkpoints."""
    sums = L * (DQK / DIMS_PER_SUM) * B_C + L * DD * B_QKV / CHECKPOINT_STEPS
    parts = {
        "gates": 2 * L * B_IF + _vectors(gate) + 2 * sums + 2 * L * B_C,
        "dv": L * (2 * DQK + 2 * DHV) * B_QKV + _vectors(gate),
        "dq": L * (3 * DQK + 2 * DHV) * B_QKV + _vectors(gate) + sums,
        "dk": L * (3 * DQK + 2 * DHV) * B_QKV + _vectors(gate) + sums,
    }
    if gate == "exp":
        parts["denominator"] = L * 2 * DHV * B_QKV + 4 * L * B_C
    return parts


def _segment_states(gate: Gate) -> sp.Expr:
    """Count the states at segment starts, for one tile.

    k and v of all segments but the last are loaded once more. One state a segment is stored, loaded and stored by state
    passing, and loaded.
    """
    return (1 - S / T) * (L * (DQK + DHV) * B_QKV + _vectors(gate)) + 4 * state(gate) * L / S


def segments_forward(gate: Gate) -> Parts:
    """Count one tile of the forward pass in segments."""
    return fused_forward(gate) | {"states of segments": _segment_states(gate)}


def segments_backward(gate: Gate) -> Parts:
    """Count one tile of the backward pass in segments, which also loads the states that the forward stored."""
    return fused_backward(gate) | {"cotangents of segments": _segment_states(gate) + state(gate) * L / S}
