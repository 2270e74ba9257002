"""What the paper claims about counts (appendix F)."""

from __future__ import annotations

from typing import Any

from tfla.paper.algorithms import get
from tfla.paper.algorithms.optimum import flop_optimal_chunk
from tfla.paper.profiled_traffic import sentence
from tfla.paper.report_types import Claim, Options

COMMAND = "tfla analyze counting"
TEST = "python -m pytest tests/paper/test_algorithms.py"
SHAPE = {"T": 8192, "dqk": 256, "dhv": 512}


def _more(d: int) -> str:
    """How many per cent mLSTMexp has more, by form."""
    found = []
    for name in ("chunkwise", "parallel", "recurrent"):
        exp, sig = (get(name, gate).flops(T=8192, L=64, dqk=d, dhv=d) for gate in ("exp", "sig"))
        found.append(f"{100 * (exp / sig - 1):.2f} % {name}")
    return ", ".join(found)


def _exponential_gate() -> Claim:
    return Claim(
        "The exponential gate costs few FLOPs",
        "that mLSTMexp has less than 2 % more FLOPs than mLSTMsig with dqk = dhv = 64, about 0.2 % with 512, in all "
        "formulations (Section F.3).",
        f"it holds. With 64: {_more(64)}; with 512: {_more(512)} (T 8,192, chunks of 64).",
        TEST,
    )


def _between_forms() -> Claim:
    def ratio(L: float, form: str) -> float:
        return float(get("chunkwise", "sig").flops(L=L, **SHAPE) / get(form, "sig").flops(**SHAPE))

    return Claim(
        "The chunk size goes from the recurrent to the parallel form",
        "that the chunkwise FLOPs match the recurrent form's at L = 1 and the parallel form's at L = T (Figure 15).",
        f"in the leading terms. With dqk 256, dhv 512 and T 8,192 the chunkwise form has {ratio(1, 'recurrent'):.3f} "
        f"times the recurrent one's FLOPs at L = 1, {ratio(8192, 'parallel'):.3f} times the parallel one's at L = T.",
        COMMAND,
    )


def _fewest() -> Claim:
    half, more = (float(flop_optimal_chunk(512, 0.5, causal)) for causal in (0.5, 0.66))
    return Claim(
        "The fewest FLOPs are at small chunks",
        "that there is a chunk size with the fewest FLOPs (111), which grows with the square root of dhv and is 16 "
        "with dhv = 512 (Section F.5, Figure 16).",
        f"it holds: the sum of the parts has its minimum at {half:.1f} with a causal factor of 0.5 and at {more:.1f} "
        "with 0.66 (dqk = 256).",
        COMMAND,
    )


def _totals() -> Claim:
    sizes: dict[str, Any] = SHAPE | {"L": 64}
    parts = float(get("chunkwise", "sig").flops(**sizes))
    off = abs(sizes["T"] - 4 * sizes["T"] / 64) / parts
    return Claim(
        "Totals and their parts",
        "totals of the chunkwise form in Table 17, from the parts in Tables 8 and 14.",
        "the parts do not quite add up to them. mLSTMsig: 12 T + T / L where Table 17 and (116) have 11 T + 5 T / L, "
        "and Table 14 has 5/2 L for cumulative forget gates that Table 8 counts as 9/2 L. mLSTMexp: 2 T dhv where "
        "Table 17 has 4 T dhv; so the difference of both is T (4 dqk + dhv + 1) and not T (4 dqk + 3 dhv + 2). "
        "All other "
        "parts and totals of Tables 14 to 17 follow from their parts. Here counts are sums of the parts; of mLSTMsig's "
        f"FLOPs the difference is {1e6 * off:.1f} in a million (dqk 256, dhv 512, L 64).",
        TEST,
    )


def _own() -> Claim:
    def growth(name: str, *sizes: dict[str, int]) -> float:
        few, many = (float(get(name, "sig").flops(**SHAPE, **more)) for more in sizes)
        return many / few

    papers = growth("chunkwise", {"L": 64}, {"L": 4096})
    ours = growth("segments", {"L": 64, "segment": 64}, {"L": 64, "segment": 4096})
    return Claim(
        "Larger chunks save memory and cost FLOPs",
        "that smaller chunks need more memory for states and larger ones more FLOPs, since the part inside a chunk is "
        "quadratic (Section 5.2).",
        f"of the paper's algorithm it holds: {papers:.1f} times the FLOPs with chunks of 4,096 instead of 64 (dqk 256, "
        f"dhv 512). Walks in segments have {ours:.2f} times the FLOPs there: inside a segment the state goes on from "
        "tile to tile, so only memory depends on the distance of stored states.",
        COMMAND,
    )


def _checked(config: Options) -> Claim:
    return Claim(
        "Counts and what is computed",
        "counts by formula, of the forward only.",
        "forward and backward, and compared with what is computed. Matrix products of the reference forms, of their "
        "gradients by autograd and of the chunkwise backend are, to the last FLOP, what torch's counter finds. Matrix "
        "products of mLSTMsig's Triton walks, and their bytes of q, k, v, h and gradients, are what Triton's "
        "interpreter computes, loads and stores (`TRITON_INTERPRET=1 python -m pytest -m interpreter tests/paper`). "
        + sentence(config),
        TEST,
    )


def claims(config: Options) -> list[Claim]:
    return [_exponential_gate(), _between_forms(), _fewest(), _own(), _totals(), _checked(config)]
