"""Context parallelism shares the passes of the GPU kernels, here in Triton's interpreter and in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, PER_STEP, TOLERANCE, error, problem, truth, truth_m
from context_cuts import compare as compare_each
from context_cuts import whole
from context_parts import own_steps, solve_with_segments
from delta_cases import delta_problem
from delta_cases import truth as delta_truth
from delta_parts import solve_part as solve_delta_part
from process_pool import Pool

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
CUTS = {
    "contiguous": ("contiguous", (130, 70)),
    "zigzag": ("zigzag", (66,) * 4),
    "one in segments": ("contiguous", (70, 30)),
}


def compare(pool: Pool, backend: str, order: str, lengths: tuple[int, ...], chosen: dict[str, Any]) -> list[int]:
    """Check all quantities of two processes, and return how many products each computed besides its kernels."""
    dtype = torch.float32 if backend == "triton" else torch.float16
    chosen = {"B": 1, "T": sum(lengths), "H": 1, "Hq": 1, **chosen}
    p = problem(**chosen, dtype=dtype)
    found = pool.run(
        2, solve_with_segments, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, backend=backend,
        dtype=dtype, kernel="fused", chunk_size=64,
    )  # fmt: skip
    products = [part.pop("products") for part in found]
    # One collective of states in the forward and one of cotangents, with those of the final states, in the backward.
    # With a normalizer two numbers of each head come first, because the segments are stabilized with max states, and
    # the cotangents of n follow those of C.
    B, spans, K, V = chosen["B"], len(lengths) // 2, chosen["K"], chosen["V"]
    sizes = [B * spans * (K * V + 2), B * (spans + 1) * (K * V + 2)]
    if p.normalize:
        forward, backward = [2, K * V + K + 3], [K * V + 3, K + 3]
        sizes = [B * spans * width for width in forward] + [B * (spans + 1) * width for width in backward]
    check = 6  # numbers that say which part the process has
    assert [part.pop("sizes") for part in found] == [[check, *sizes]] * 2
    steps = torch.cat([own_steps(rank, 2, order, lengths) for rank in range(2)]).argsort()
    for name, x in truth(p).items():
        every = [part[name].double() for part in found]
        ours = torch.cat(every, 1)[:, steps] if name in PER_STEP else every[0]
        if name[0] == "d" and name not in PER_STEP:
            ours = every[0] + every[1]
        assert error(ours, x) <= TOLERANCE[dtype], name
    return products


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_triton(pool: Pool, form: str, cut: str) -> None:
    order, lengths = CUTS[cut]
    chosen = {"form": form, "K": 16, "V": 16, "carried": cut != "zigzag"}
    products = compare(pool, "triton", order, lengths, chosen)
    assert [bool(count) for count in products] == [False, cut == "one in segments"]  # of a process without segments


@pytest.mark.parametrize(
    ("form", "dims"), [("exp", (64, 64)), ("exp", (128, 128)), ("sigmoid", (128, 128)), ("exp", (256, 128))]
)
def test_hopper(pool: Pool, form: str, dims: tuple[int, int]) -> None:
    pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
    chosen = {"form": form, "K": dims[0], "V": dims[1]}
    assert compare(pool, "hopper", "contiguous", (140, 70), chosen) == [0, 0]


DELTA = {
    "dense": {"T": 130, "B": 2},
    "packed": {"lengths": (50, 0, 60, 20), "Hq": 1},
    "wide": {"T": 60, "B": 1, "H": 1, "Hq": 1, "V": 250},  # the kernels do not take [v | 0]
}


@pytest.mark.parametrize("sizes", DELTA.values(), ids=DELTA.keys())
@pytest.mark.parametrize("model", ["deltanet", "gdn", "kda"])
def test_delta_rule_in_triton(pool: Pool, model: str, sizes: dict[str, Any]) -> None:
    chosen = {"model": model, "K": 16, "V": 16, **sizes}
    p = delta_problem(**chosen)
    T = p.x.q.shape[1]
    lengths = (T // 2 - 7, T - T // 2 + 7)
    found = pool.run(
        2, solve_delta_part, given=chosen, order="contiguous", lengths=lengths, share=0.5, dtype=torch.float32,
        backend="triton",
    )  # fmt: skip
    every = whole(found, "contiguous", lengths)
    compare_each({name: x.double() for name, x in every.items()}, delta_truth(p), TOLERANCE[torch.float32])
