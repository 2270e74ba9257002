"""Context parallelism shares the passes of the Triton kernels, here in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETED, PER_STEP, TOLERANCE, error, problem, truth, truth_m
from context_parts import own_steps, solve_with_segments
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


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_results_are_the_truth(pool: Pool, form: str, cut: str) -> None:
    order, lengths = CUTS[cut]
    chosen = {"form": form, "B": 1, "T": sum(lengths), "H": 1, "Hq": 1, "K": 16, "V": 16, "carried": cut != "zigzag"}
    p = problem(**chosen, dtype=torch.float32)
    found = pool.run(
        2, solve_with_segments, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, backend="triton",
        dtype=torch.float32, kernel="fused", chunk_size=64,
    )  # fmt: skip
    steps = torch.cat([own_steps(rank, 2, order, lengths) for rank in range(2)]).argsort()
    calls = [part.pop("products") for part in found]
    assert [bool(count) for count in calls] == [False, cut == "one in segments"]  # of a process without segments
    for name, x in truth(p).items():
        every = [part[name].double() for part in found]
        mine = torch.cat(every, 1)[:, steps] if name in PER_STEP else every[0]
        if name[0] == "d" and name not in PER_STEP:
            mine = every[0] + every[1]
        assert error(mine, x) <= TOLERANCE[torch.float32], name
