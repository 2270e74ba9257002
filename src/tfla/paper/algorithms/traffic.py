"""Bytes that every form loads and stores, part by part: Tables 9, 11 and 13, and by their rules the backward and this
library's own ways. What a kernel loads twice counts once."""

from __future__ import annotations

import sympy as sp

from tfla.backends.triton.marks import APART
from tfla.paper.algorithms.symbols import B_C, B_IF, B_QKV, B_VEC, DD, DHV, DQK, Gate, L, Parts, S, T

# Steps between those states that walks leave for the gradients of the gates; Triton's of mLSTMsig are closer.
MARKS = APART[2]
SUMMED = 16  # dims of q dq and k dk that a walk sums before it stores them


def state(gate: Gate) -> sp.Expr:
    """C, and for mLSTMexp n and m."""
    return (DD + DQK + 1 if gate == "exp" else DD) * B_C


def chunkwise_forward(gate: Gate) -> Parts:
    """Table 9, one chunk."""
    return {
        "states: load": L * (DQK + DHV) * B_QKV + 2 * L * B_IF,
        "states: store": state(gate),
        "outputs: load": L * (2 * DQK + DHV) * B_QKV + 2 * L * B_IF + state(gate),
        "outputs: store": L * DHV * B_QKV + (2 * L * B_C if gate == "exp" else 0),
    }


def chunkwise_backward(gate: Gate) -> Parts:
    """One chunk: cotangents of states, then a kernel each for dq, dk, dv, which also load n and m of each step."""
    rows = 2 * L * B_IF + state(gate) + (2 * L * B_C if gate == "exp" else 0)
    denominator = 2 * L * DHV * B_QKV if gate == "exp" else sp.Integer(0)  # h and dh
    return {
        "cotangents of states": L * (DQK + DHV) * B_QKV + rows,
        "dq": L * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dk": L * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dv": L * (2 * DQK + 2 * DHV) * B_QKV + rows,
        "gates": denominator + 2 * L * B_IF + 4 * L * B_C,  # sums of q dq and k dk, there and back
    }


def parallel_forward(gate: Gate) -> Parts:
    """Table 11, a sequence."""
    return {
        "load": T * (2 * DQK + DHV) * B_QKV + 2 * T * B_IF,
        "store": T * DHV * B_QKV + (2 * T * B_C if gate == "exp" else 0),
    }


def parallel_backward(gate: Gate) -> Parts:
    """A sequence: a kernel for dq, one for dk and dv, as in attention."""
    rows = 2 * T * B_IF + (2 * T * B_C if gate == "exp" else 0)
    denominator = 2 * T * DHV * B_QKV if gate == "exp" else sp.Integer(0)
    return {
        "dq": T * (3 * DQK + 2 * DHV) * B_QKV + rows,
        "dk and dv": T * (3 * DQK + 3 * DHV) * B_QKV + rows,
        "gates": denominator + 2 * T * B_IF + 4 * T * B_C,
    }


def recurrent_forward(gate: Gate) -> Parts:
    """Table 13, one step."""
    return {
        "load": (2 * DQK + DHV) * B_QKV + 2 * B_IF + state(gate),
        "store": DHV * B_QKV + state(gate),
    }


def recurrent_backward(gate: Gate) -> Parts:
    """One step: its state, and the state's cotangent in and out."""
    return {
        "load": (2 * DQK + (3 if gate == "exp" else 2) * DHV) * B_QKV + 2 * B_IF + 2 * state(gate),
        "store": (2 * DQK + DHV) * B_QKV + 2 * B_IF + state(gate),
    }


def _vectors(gate: Gate) -> sp.Expr:
    """What a walk reads of a tile's gates: the matrix' rows and columns, weights of state and updates, the decay."""
    return (6 if gate == "exp" else 5) * L * B_VEC


def fused_forward(gate: Gate) -> Parts:
    """One tile."""
    return {
        "gates": 2 * L * B_IF + _vectors(gate),
        "load": L * (2 * DQK + DHV) * B_QKV + _vectors(gate),
        "store": L * DHV * B_QKV + (L * B_C if gate == "exp" else 0),
    }


def fused_backward(gate: Gate) -> Parts:
    """One tile. dq and dk leave sums for the gates, and now and then their states."""
    sums = L * (DQK / SUMMED) * B_C + L * DD * B_QKV / MARKS
    parts = {
        "gates": 2 * L * B_IF + _vectors(gate) + 2 * sums + 2 * L * B_C,
        "dv": L * (2 * DQK + 2 * DHV) * B_QKV + _vectors(gate),
        "dq": L * (3 * DQK + 2 * DHV) * B_QKV + _vectors(gate) + sums,
        "dk": L * (3 * DQK + 2 * DHV) * B_QKV + _vectors(gate) + sums,
    }
    if gate == "exp":
        parts["denominator"] = L * 2 * DHV * B_QKV + 4 * L * B_C
    return parts


def _boundaries(gate: Gate) -> sp.Expr:
    """Of one tile: k and v once more, but of the last segment, and each segment's state stored, joined in place, and
    loaded."""
    return (1 - S / T) * (L * (DQK + DHV) * B_QKV + _vectors(gate)) + 4 * state(gate) * L / S


def segments_forward(gate: Gate) -> Parts:
    return fused_forward(gate) | {"states of segments": _boundaries(gate)}


def segments_backward(gate: Gate) -> Parts:
    """Backward the states that the forward stored are loaded once more."""
    return fused_backward(gate) | {"cotangents of segments": _boundaries(gate) + state(gate) * L / S}
