"""Context parallelism on two GPUs of one host: NCCL, the GPU backends, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_parts import CASES, solve_attention
from cases import FORMS, PER_STEP, TOLERANCE, error, problem, truth, truth_m
from context_cuts import whole
from context_parts import captured, own_steps, solve_part, solve_with_segments
from delta_cases import check_beside_terms, delta_problem
from delta_parts import captured as delta_captured
from delta_parts import solve_part as solve_delta_part
from process_pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    found = Pool(2, "nccl")
    yield found
    found.close()


LAYOUTS = {"contiguous": (331, 213), "zigzag": (100, 172, 131, 141)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_the_truth(gpus: Pool, form: str, dtype: torch.dtype, order: str, packed: bool) -> None:
    sizes: dict[str, Any] = {"lengths": (100, 0, 300, 144)} if packed else {"T": 544, "B": 2}
    chosen = {"form": form, "H": 4, "Hq": 2, "K": 32, "V": 64, **sizes}
    lengths = LAYOUTS[order]
    p = problem(**chosen, dtype=dtype)
    exact = truth(p)
    found = gpus.run(
        2, solve_part, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, backend=None, dtype=dtype,
        device="cuda",
    )  # fmt: skip
    steps = torch.cat([own_steps(rank, 2, order, lengths) for rank in range(2)]).argsort()
    for name, x in exact.items():
        every = [part[name].double() for part in found]
        if name in PER_STEP:
            ours = torch.cat(every, 1)[:, steps]
        else:
            ours = every[0] if name in ("C", "n") else every[0] + every[1]
        assert error(ours, x) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "dims"), [("gdn", (128, 128)), ("deltanet", (64, 64)), ("gdn", (128, 256)), ("kda", (64, 64))]
)
def test_delta_rule(gpus: Pool, model: str, dims: tuple[int, int], order: str, packed: bool) -> None:
    sizes: dict[str, Any] = {"lengths": (100, 0, 300, 144)} if packed else {"T": 544, "B": 2}
    chosen = {"model": model, "H": 4, "Hq": 2, "K": dims[0], "V": dims[1], **sizes}
    lengths = LAYOUTS[order]
    p = delta_problem(**chosen, dtype=torch.bfloat16)
    found = gpus.run(
        2, solve_delta_part, given=chosen, order=order, lengths=lengths, share=0.5, dtype=torch.bfloat16, device="cuda"
    )
    every = whole([{name: x.double() for name, x in part.items()} for part in found], order, lengths)
    check_beside_terms(p, every)


def check_repeats(pool: Pool, solve: Callable[..., dict[str, torch.Tensor]], order: str, **arguments: Any) -> None:
    """Check that both processes get the same bits in three calls."""
    common = {"order": order, "lengths": LAYOUTS[order], "share": 0.5, "dtype": torch.bfloat16, "device": "cuda"}
    runs = [pool.run(2, solve, **common, **arguments) for _ in range(3)]
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(x, other[name]) for other in others for name, x in first.items())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_the_delta_rule_repeats_bit_for_bit(gpus: Pool, model: str, order: str, packed: bool) -> None:
    sizes: dict[str, Any] = {"lengths": (100, 0, 300, 144)} if packed else {"T": 544, "B": 2}
    check_repeats(gpus, solve_delta_part, order, given={"model": model, "H": 4, "Hq": 2, "K": 64, "V": 64, **sizes})


@pytest.mark.parametrize(("packed", "chunk_size"), [(False, None), (False, 64), (True, None)])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_results_repeat_bit_for_bit(gpus: Pool, form: str, order: str, packed: bool, chunk_size: int | None) -> None:
    sizes: dict[str, Any] = {"lengths": (100, 0, 300, 144)} if packed else {"T": 544, "B": 2}
    chosen = {"form": form, "H": 4, "Hq": 2, "K": 128, "V": 128, **sizes}
    m = truth_m(problem(**chosen, dtype=torch.bfloat16))
    check_repeats(gpus, solve_part, order, given=chosen, m=m, backend=None, chunk_size=chunk_size)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_the_delta_rule_is_captured_in_a_cuda_graph(gpus: Pool, model: str, order: str) -> None:
    assert all(gpus.run(2, delta_captured, model=model, order=order))


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_segments_are_exchanged(gpus: Pool, form: str, dtype: torch.dtype, order: str) -> None:
    lengths = {"contiguous": (288, 256), "zigzag": (136,) * 4}[order]
    chosen = {"form": form, "H": 2, "Hq": 2, "K": 128, "V": 128, "T": 544, "B": 2}
    p = problem(**chosen, dtype=dtype)
    found = gpus.run(
        2, solve_with_segments, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, backend=None,
        dtype=dtype, device="cuda", chunk_size=64,
    )  # fmt: skip
    assert [part.pop("products") for part in found] == [0, 0]
    assert [len(part.pop("sizes")) for part in found] == [4 if form == "exp" else 2] * 2
    steps = torch.cat([own_steps(rank, 2, order, lengths) for rank in range(2)]).argsort()
    for name, x in truth(p).items():
        every = [part[name].double() for part in found]
        if name in PER_STEP:
            ours = torch.cat(every, 1)[:, steps]
        else:
            ours = every[0] if name in ("C", "n") else every[0] + every[1]
        assert error(ours, x) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_captured_in_a_cuda_graph(gpus: Pool, form: str, chunk_size: int | None) -> None:
    assert all(gpus.run(2, captured, form=form, chunk_size=chunk_size))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_rounds(gpus: Pool, dtype: torch.dtype, case: str) -> None:
    """In bfloat16 what is not masked is torch's flash attention, by operators that no test on a CPU reaches."""
    for order, lengths in (("contiguous", (600, 400)), ("zigzag", (304, 200, 400, 96))):
        found = gpus.run(2, solve_attention, dtype=dtype, device="cuda", order=order, lengths=lengths, **CASES[case])
        for errors in found:
            assert max(errors.values()) <= TOLERANCE[dtype], errors
