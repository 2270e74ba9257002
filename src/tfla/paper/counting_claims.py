"""The values of the claims about counted FLOPs and bytes (appendix F)."""

from __future__ import annotations

from tfla.paper.algorithms import get
from tfla.paper.algorithms.optimum import flop_optimal_chunk
from tfla.paper.claims_template import Values, fill
from tfla.paper.profiled_traffic import claim_values
from tfla.paper.report_types import Claim, Options, Table

SHAPE = {"T": 8192, "dqk": 256, "dhv": 512}


def _exponential_gate() -> Values:
    """Return how many FLOPs more mLSTMexp has than mLSTMsig, for small and for large heads."""
    algorithms = ("chunkwise", "parallel", "recurrent")
    more: dict[int, list[float]] = {}
    for d in (64, 512):
        flops = [[get(name, gate).flops(T=8192, L=64, dqk=d, dhv=d) for gate in ("exp", "sig")] for name in algorithms]
        more[d] = [100 * float(exp / sig - 1) for exp, sig in flops]
    rows = [[f"{d}", *(f"{x:.2f} %" for x in found)] for d, found in more.items()]
    return {
        "holds": max(more[64]) < 2 and max(more[512]) < 0.25,
        "table": Table(["dqk = dhv", *algorithms], rows),
    }


def _chunk_size_limits() -> Values:
    """Compare the chunkwise algorithm at L = 1 with the recurrent one, and at L = T with the parallel one."""

    def ratio(L: float, name: str) -> str:
        return f"{float(get('chunkwise', 'sig').flops(L=L, **SHAPE) / get(name, 'sig').flops(**SHAPE)):.3f}"

    return {"at_one": ratio(1, "recurrent"), "at_T": ratio(8192, "parallel")}


def _fewest_flops() -> Values:
    """Return the chunk sizes with the fewest FLOPs, for two causal factors."""
    causal_factors = {"half": 0.5, "two_thirds": 0.66}
    return {name: f"{float(flop_optimal_chunk(512, 0.5, causal)):.1f}" for name, causal in causal_factors.items()}


def _larger_chunks() -> Values:
    """Return how the FLOPs grow from small to large chunks, and from short to long segments."""

    def growth(name: str, *sizes: dict[str, int]) -> float:
        few, many = (float(get(name, "sig").flops(**SHAPE, **more)) for more in sizes)
        return many / few

    return {
        "paper": f"{growth('chunkwise', {'L': 64}, {'L': 4096}):.1f}",
        "segments": f"{growth('segments', {'L': 64, 'segment': 64}, {'L': 64, 'segment': 4096}):.2f}",
    }


def _totals() -> Values:
    """Return by how much the paper's table of totals differs from the sum of its parts."""
    T, L = SHAPE["T"], 64
    parts = float(get("chunkwise", "sig").flops(L=L, **SHAPE))
    return {"per_million": f"{1e6 * abs(T - 4 * T / L) / parts:.1f}"}


def claims(config: Options) -> list[Claim]:
    """Return the claims about counts with their numbers."""
    return fill(
        {
            "exponential_gate": _exponential_gate(),
            "chunk_size_limits": _chunk_size_limits(),
            "fewest_flops": _fewest_flops(),
            "larger_chunks": _larger_chunks(),
            "totals": _totals(),
            "checked_counts": claim_values(config),
        }
    )
