"""The weights of a run on several GPUs are kept between forward and backward where an estimate says that they fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfla.nn import ModelConfig
from tfla.train.commands import _with_values
from tfla.train.gathers import Gathers, Step, choose, chosen
from tfla.train.ranks import Ranks

GIB = 2**30
MODEL = ModelConfig(d_model=2048, num_blocks=24, num_heads=8, vocab_size=50_257, mixer="mlstm_exp")
STEP = Step(MODEL, 2 * 8192, bfloat16=True, checkpointing=False, gathered_in_bfloat16=False)
KEPT, FREED = Gathers(False, 2), Gathers(True, 1)


@pytest.mark.parametrize(
    ("step", "sizes", "total", "free", "expected"),
    [
        (STEP, {"dp_shard": 2}, 79, 78, KEPT),  # the step of `tfla bench gpu train_fsdp`
        (STEP, {"dp_shard": 2}, 79, 60, Gathers(True, 2)),  # another process has memory of the GPU
        (STEP, {"dp_shard": 2}, 72, 71, FREED),
        (STEP._replace(loss_kernels=True), {"dp_shard": 2}, 72, 71, KEPT),
        (STEP._replace(tokens=4 * 8192), {"dp_shard": 2}, 79, 78, FREED),
        (STEP._replace(tokens=4 * 8192, checkpointing=True), {"dp_shard": 2}, 79, 78, KEPT),
        (STEP._replace(model=replace(MODEL, d_model=4096, num_blocks=32)), {"dp_shard": 8}, 79, 78, FREED),
        (STEP, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 79, 78, KEPT),
        (STEP, {"cp": 2}, 0, 0, FREED),  # a CPU
    ],
)
def test_weights_are_kept_where_they_fit(
    step: Step, sizes: dict[str, int], total: float, free: float, expected: Gathers
) -> None:
    assert choose(None, None, step, sizes, total * GIB, free * GIB) == expected


@given(
    sizes=st.fixed_dictionaries({name: st.sampled_from([1, 2, 8]) for name in ("dp_shard", "cp", "tp")}),
    total=st.integers(1, 300), used=st.integers(0, 300), bfloat16=st.booleans(), tokens=st.integers(1, 10**6),
)  # fmt: skip
def test_what_is_kept_fits(sizes: dict[str, int], total: int, used: int, bfloat16: bool, tokens: int) -> None:
    """The number of blocks, which may change the order of sums, does not depend on what else is in memory."""
    step = STEP._replace(gathered_in_bfloat16=bfloat16, tokens=tokens)
    free = max(0, total - used)
    found = choose(None, None, step, sizes, total * GIB, free * GIB)
    parameters, parts = 1.37e9, sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    # Weights, gradients and two moments of this GPU; all weights, and their bfloat16 copies; the residual stream.
    least = 16 * parameters / parts + (2 if bfloat16 else 6) * parameters / sizes["tp"] + 24 * 4 * 2048 * tokens
    if not found.reshard_after_forward:
        assert least <= 0.9 * min(total, free) * GIB
    assert found.blocks_per_gather == choose(None, None, step, sizes, total * GIB, total * GIB).blocks_per_gather


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"model": replace(MODEL, d_model=4096, num_blocks=32), "tokens": 4096}, {"dp_shard": 8}),  # 78.2 GiB
        ({"whole_gradients": True}, {"dp_shard": 2}),
        ({"prefetch": 10}, {"dp_shard": 2}),
    ],
)
def test_whole_weights_count_on_every_gpu(changes: dict[str, Any], sizes: dict[str, int]) -> None:
    """Of a model of 6.87B parameters over 8 GPUs autocast keeps 13 GB in bfloat16 on each, not an eighth of them."""
    assert choose(None, None, STEP._replace(**changes), sizes, 79 * GIB, 78 * GIB) == FREED


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--parallel.no-reshard-after-forward"], ["--parallel.reshard-after-forward", "False"]),
        (
            ["--parallel.reshard_after_forward", "--steps", "3"],
            ["--parallel.reshard-after-forward", "True", "--steps", "3"],
        ),
        (["--parallel.reshard-after-forward"], ["--parallel.reshard-after-forward", "True"]),
        (["--parallel.reshard-after-forward", "None"], ["--parallel.reshard-after-forward", "None"]),
    ],
)
def test_the_option_needs_no_value(words: list[str], expected: list[str]) -> None:
    assert _with_values(words) == expected


@pytest.mark.parametrize("total", [0, 79])
def test_options_are_obeyed(total: int) -> None:
    for kept in (False, True):
        assert choose(kept, 3, STEP, {"dp_shard": 2}, total * GIB, total * GIB) == (kept, 3)
    assert choose(True, None, STEP, {"dp_shard": 2}, total * GIB, total * GIB) == FREED


def test_weights_are_freed_on_cpus() -> None:
    assert chosen(None, None, STEP, Ranks()) == FREED
