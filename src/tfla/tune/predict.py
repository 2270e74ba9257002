"""The cost model of kernels and chunk sizes, from counts of FLOPs and bytes and three numbers of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tfla.backends.gpu.checkpoints import checkpoint_interval
from tfla.backends.hopper.head_dims import padded_head_dims
from tfla.measure.problem import Problem
from tfla.measure.roofline import TILE, backward_bytes, backward_flops, forward_bytes, forward_flops

STATE_BYTES = 4  # of one element of a stored state
SMALLEST = 64
# The fraction of the roofline below that each kernel reaches on an H200, forward and backward together; measured in
# fig4.json and fig5.json of benchmarks/results. With wide keys the state leaves Triton's fused kernels few registers.
# The states at the starts of segments cost the same in all fused kernels.
REACHED = {("hopper", "fused"): 0.47, ("triton", "fused"): 0.34, ("triton", "tfla"): 0.39}
WIDE_KEYS, REACHED_WIDE = 128, 0.08
REACHED_STATES = 0.48
WIDEST = 512  # columns of a state that two programs of the Hopper backend hold; with more they store partial dq and dk


@dataclass(frozen=True)
class Machine:
    """The machine: FLOP/s of large matrix products, byte/s of copies, and the number of parallel processors."""

    name: str
    flops: float
    bandwidth: float
    processors: int


@dataclass(frozen=True)
class Candidate:
    """A kernel and a chunk size, with predicted seconds and bytes beyond the inputs of forward and backward."""

    backend: str
    kernel: str
    chunk_size: int
    seconds: float
    peak_bytes: int

    @property
    def implementation(self) -> str:
        """The names of backend and kernel."""
        return f"{self.backend} {self.kernel}"


def predict(p: Problem, normalize: bool, backend: str, kernel: str, chunk_size: int, machine: Machine) -> Candidate:
    """Predict time and memory of forward and backward of one call."""
    fused = backend != "chunkwise" and kernel != "tfla"
    # Fused kernels over whole sequences store no states.
    chunks = 0 if fused and chunk_size >= p.T else ceil(p.T / chunk_size)
    states = p.B * p.H * chunks * p.dqk * (p.dhv + normalize) * STATE_BYTES  # bytes of the stored states
    seconds = _seconds(p, normalize, backend, kernel, chunk_size, states, machine)
    return Candidate(
        backend, kernel, chunk_size, seconds, _peak_bytes(p, normalize, backend, kernel, chunk_size, states)
    )


def _seconds(
    p: Problem, normalize: bool, backend: str, kernel: str, chunk_size: int, states: int, machine: Machine
) -> float:
    """Predict the seconds of forward and backward.

    The paper's kernels ("tfla") are quadratic inside a chunk and read all inputs once more for each result; their times
    for FLOPs and bytes add up, as in (116). Fused kernels have the FLOPs of tiles, whatever the chunk size. Segments
    occupy processors that whole sequences leave idle, but first need the states at their starts. Both kinds of kernels
    move the states that they store.
    """
    heads, whole = p.B * p.H, chunk_size >= p.T
    L = min(chunk_size, p.T) if kernel == "tfla" else TILE
    flops = p.B * (forward_flops(p.T, p.H, p.dqk, p.dhv, L) + backward_flops(p.T, p.H, p.dqk, p.dhv, L))
    moved = p.B * (
        forward_bytes(p.T, p.H, p.dqk, p.dhv, p.itemsize)
        + backward_bytes(p.T, p.H, p.dqk, p.dhv, p.itemsize, normalize)
    )
    pair = heads * p.T * (p.dqk + p.dhv) * p.itemsize  # bytes of one of q, k and one of v, dh
    reached = REACHED.get((backend, kernel), 1.0)
    if kernel == "tfla":
        return (flops / machine.flops + (10 * pair + 6 * states) / machine.bandwidth) / reached
    if backend == "chunkwise":
        return max(flops / machine.flops, (moved + 3 * states) / machine.bandwidth) / reached
    programs, of_states = heads, 0.0
    if not whole:
        programs = heads * ceil(p.T / chunk_size)
        flops += 4 * heads * p.T * p.dqk * p.dhv
        moved += 2 * pair
        of_states = 8 * states / (REACHED_STATES * machine.bandwidth)
    if backend == "triton" and p.dqk > WIDE_KEYS:
        reached = REACHED_WIDE
    seconds = max(flops / machine.flops, moved / machine.bandwidth)
    rounds = ceil(programs / machine.processors)  # the last round may leave processors idle
    return seconds * machine.processors * rounds / programs / reached + of_states


def _peak_bytes(p: Problem, normalize: bool, backend: str, kernel: str, chunk_size: int, states: int) -> int:
    """Predict the peak memory of forward and backward beyond the inputs: results, states and checkpoints."""
    heads = p.B * p.H
    results = heads * p.T * ((2 * p.dhv + 2 * p.dqk) * p.itemsize + 3 * STATE_BYTES)
    kept = states if backend == "chunkwise" else 2 * states
    # The states of padded heads have the dims of the kernel.
    dqk, dhv = (padded_head_dims(p.dqk, p.dhv) if backend == "hopper" else None) or (p.dqk, p.dhv)
    checkpoint_steps = checkpoint_interval(p.dqk, p.dhv, p.itemsize, dqk * dhv, backend == "triton" and not normalize)
    if backend != "chunkwise" and kernel != "tfla" and min(chunk_size, p.T) > checkpoint_steps:
        each = heads * (p.T // checkpoint_steps) * dqk * dhv * p.itemsize
        of_dv = heads * p.T * dhv * p.itemsize  # memory that Triton's fused kernels use for both, or for one of them
        kept += each if backend == "hopper" else each * (2 - min(2, of_dv // each))
    if backend == "hopper" and (parts := p.dhv // WIDEST) > 1:
        results += 2 * heads * p.T * parts * p.dqk * p.itemsize
    return results + kept


def chunk_sizes(T: int) -> list[int]:
    """Return the chunk sizes to compare: powers of two from 64 to below T, and T, the whole sequence."""
    found, L = [], SMALLEST
    while L < T:
        found.append(L)
        L *= 2
    return [*found, T]
