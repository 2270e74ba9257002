"""What a chunk size should cost, from counts and three numbers of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tfla.backends.gpu.checkpoints import steps_between
from tfla.backends.hopper import padded_head_dims
from tfla.measure.problem import Problem
from tfla.measure.roofline import TILE, backward_bytes, backward_flops, forward_bytes, forward_flops

STATE_BYTES = 4  # of a number of a stored state
SMALLEST = 64
# What share of the bounds below kernels reach, forward and backward together, on an H200: fig4.json and fig5.json of
# benchmarks/results. The state of a head with wide keys leaves Triton's walks few registers; what states at the starts
# of segments take is the same for all.
REACHED = {("hopper", "fused"): 0.47, ("triton", "fused"): 0.34, ("triton", "tfla"): 0.39}
WIDE_KEYS, REACHED_WIDE = 128, 0.08
REACHED_STATES = 0.48
WIDEST = 512  # values of a state that two programs of the Hopper backend hold; of more they leave parts of dq and dk


@dataclass(frozen=True)
class Machine:
    """Where it runs: FLOP/s of large matrix products, byte/s of copies, processors that work in parallel."""

    name: str
    flops: float
    bandwidth: float
    processors: int


@dataclass(frozen=True)
class Candidate:
    """A kernel and a chunk size, with what forward and backward should take: seconds, bytes beyond the inputs."""

    backend: str
    kernel: str
    chunk_size: int
    seconds: float
    peak_bytes: int

    @property
    def way(self) -> str:
        return f"{self.backend} {self.kernel}"


def predict(p: Problem, normalize: bool, backend: str, kernel: str, chunk_size: int, machine: Machine) -> Candidate:
    """Forward and backward of one call.

    The paper's kernels ("tfla") are quadratic inside a chunk and read all inputs once more for each result: FLOPs and
    bytes add up, as in (116). Walks have the FLOPs of one tile whatever the chunk; segments fill processors that whole
    sequences leave idle, but need the states at their starts first. Both move the states they store.
    """
    heads, chunks = p.B * p.H, ceil(p.T / chunk_size)
    whole = chunk_size >= p.T
    gpu_walk = backend != "chunkwise" and kernel != "tfla"
    one = p.dqk * (p.dhv + normalize) * STATE_BYTES
    states = 0 if gpu_walk and whole else heads * chunks * one
    L = TILE if kernel != "tfla" else min(chunk_size, p.T)
    flops = p.B * (forward_flops(p.T, p.H, p.dqk, p.dhv, L) + backward_flops(p.T, p.H, p.dqk, p.dhv, L))
    moved = p.B * (
        forward_bytes(p.T, p.H, p.dqk, p.dhv, p.itemsize)
        + backward_bytes(p.T, p.H, p.dqk, p.dhv, p.itemsize, normalize)
    )
    pair = heads * p.T * (p.dqk + p.dhv) * p.itemsize  # one of q, k with one of v, dh
    of_states = 0.0  # seconds beside the walks
    if kernel == "tfla":
        seconds = flops / machine.flops + (10 * pair + 6 * states) / machine.bandwidth
    elif gpu_walk and not whole:
        flops += 4 * heads * p.T * p.dqk * p.dhv
        seconds = max(flops / machine.flops, (moved + 2 * pair) / machine.bandwidth)
        of_states = 8 * states / (REACHED_STATES * machine.bandwidth)
    else:
        seconds = max(flops / machine.flops, (moved + 3 * states) / machine.bandwidth)
    if gpu_walk:
        programs = heads * (1 if whole else chunks)
        seconds *= machine.processors * ceil(programs / machine.processors) / programs
    share = REACHED.get((backend, kernel), 1.0)
    seconds /= REACHED_WIDE if (backend, kernel) == ("triton", "fused") and p.dqk > WIDE_KEYS else share
    results = heads * p.T * ((2 * p.dhv + 2 * p.dqk) * p.itemsize + 3 * STATE_BYTES)
    kept = states if backend == "chunkwise" else 2 * states
    dqk, dhv = (padded_head_dims(p.dqk, p.dhv) if backend == "hopper" else None) or (p.dqk, p.dhv)  # of states
    marks = steps_between(p.dqk, p.dhv, p.itemsize, dqk * dhv, backend == "triton" and not normalize)
    if gpu_walk and min(chunk_size, p.T) > marks:
        each = heads * (p.T // marks) * dqk * dhv * p.itemsize
        of_dv = heads * p.T * dhv * p.itemsize  # memory that Triton's walks have for both, or for one of them
        kept += each if backend == "hopper" else each * (2 - min(2, of_dv // each))
    if backend == "hopper" and (parts := p.dhv // WIDEST) > 1:
        results += 2 * heads * p.T * parts * p.dqk * p.itemsize
    return Candidate(backend, kernel, chunk_size, seconds + of_states, results + kept)


def chunk_sizes(T: int) -> list[int]:
    """Powers of two from 64 up to below T, and T: the whole sequence."""
    found, L = [], SMALLEST
    while L < T:
        found.append(L)
        L *= 2
    return [*found, T]
