"""Parts that do not fit together are an error of every process, so that none waits for one that has raised."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import Pool
from torch import Tensor

import tfla
from tfla.distributed import ContextParallel


def _operators(T: int) -> dict[str, Callable[..., Tensor]]:
    """Calls of T steps with two heads, and for delta_product with two writes in each step."""
    x, gate = torch.ones(1, T, 2, 4, dtype=torch.float64), torch.zeros(1, T, 2, dtype=torch.float64)
    k, beta = torch.ones(1, 2 * T, 2, 4, dtype=torch.float64), torch.zeros(1, 2 * T, 2, dtype=torch.float64)
    return {
        "mlstm": functools.partial(tfla.mlstm, x, x, x, gate, gate),
        "linear_attention": functools.partial(tfla.linear_attention, x, x, x, gate),
        "channel gates": functools.partial(tfla.linear_attention, x, x, x, -x),
        "delta_rule": functools.partial(tfla.delta_rule, x, x, x, gate),
        "delta_product": functools.partial(tfla.delta_product, x, k, k, beta, writes=2),
    }


def _refusal(
    group: dist.ProcessGroup,
    *,
    operator: str,
    parts: tuple[int, ...],
    offsets: tuple[tuple[int, ...] | None, ...],
    options: dict[str, Any],
    compiled: bool = False,
    before: tuple[int, ...] | None = None,
) -> str:
    """Return the message of the exception of this process.

    Args:
        parts: the steps of each process.
        offsets: the offsets that each process passes, or one for all.
        options: those of ContextParallel; without any the group is passed.
        compiled: the call is compiled.
        before: the steps that each process has in a good call before.
    """
    rank = dist.get_rank(group)
    call, own = _operators(parts[rank])[operator], offsets[rank % len(offsets)]
    context = ContextParallel(group, **options) if options else group
    cu_seqlens = None if own is None else torch.tensor(own)
    if before is not None:
        _operators(before[rank])[operator](context_parallel=context, cu_seqlens=cu_seqlens)
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with pytest.raises(ValueError) as refused:
        run(context_parallel=context, cu_seqlens=cu_seqlens)
    return str(refused.value)


OPERATORS = sorted(_operators(1))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("parts", [(4, 6), (4, 5, 6), (6, 4, 5, 5)])  # in the last two, some T fits all offsets
def test_packed_parts_without_lengths(pool: Pool, operator: str, parts: tuple[int, ...]) -> None:
    offsets = (0, 3, sum(parts))
    found = pool.run(len(parts), _refusal, operator=operator, parts=parts, offsets=(offsets,), options={})
    expected = (
        f"q: got {', '.join(map(str, parts))} steps on the {len(parts)} processes of context_parallel, expected as "
        "many on each: for parts of other sizes pass tfla.distributed.ContextParallel(group, order='contiguous', "
        f"lengths=...), here {parts}"
    )
    assert found == [expected] * len(parts)


@pytest.mark.parametrize("operator", ["mlstm", "delta_rule"])
def test_compiled_packed_parts_without_lengths(pool: Pool, operator: str) -> None:
    for message in pool.run(
        3, _refusal, operator=operator, parts=(4, 5, 6), offsets=((0, 7, 15),), options={}, compiled=True
    ):
        assert re.match(r"q: got 4, 5, 6 steps on the 3 processes .*, here \(4, 5, 6\)$", message), message


@pytest.mark.parametrize("operator", ["mlstm", "delta_rule"])
@pytest.mark.parametrize(
    ("parts", "options", "offsets", "message"),
    [
        ((4, 5), {"order": "zigzag"}, None, "q: got 4, 5 steps .*, expected even numbers with order 'zigzag'"),
        ((4, 6), {"order": "zigzag"}, (0, 10), "q: got 4, 6 steps .* here those of all 4 spans in the order of time$"),
        ((4, 5), {"lengths": (4, 6)}, None, r"q: got 4, 5 steps .*, expected 4, 6, by its lengths \(4, 6\)$"),
        ((4, 5), {"lengths": (4, 6)}, (0, 9), r"q: got 4, 5 steps .*, expected 4, 6, by its lengths \(4, 6\)$"),
    ],
)
def test_orders_and_lengths(
    pool: Pool, operator: str, parts: tuple[int, ...], options: dict[str, Any], offsets: Any, message: str
) -> None:
    for found in pool.run(2, _refusal, operator=operator, parts=parts, offsets=(offsets,), options=options):
        assert re.match(message, found), found


@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_that_differ(pool: Pool, operator: str) -> None:
    for message in pool.run(
        3, _refusal, operator=operator, parts=(4, 4, 4), offsets=((0, 12), (0, 4), (0, 5, 12)), options={}
    ):
        assert message == (
            "cu_seqlens: got offsets that differ among the 3 processes of context_parallel (2 up to 12, 2 up to 4, "
            "3 up to 12), expected those of the whole sequence, the same on each"
        )


def test_a_process_that_knows_the_plan_of_its_call_checks_too(pool: Pool) -> None:
    """The second process makes a call as before, for which its checks are not repeated."""
    given = {"parts": (4, 6), "before": (6, 6), "offsets": ((0, 7, 12),), "options": {"lengths": (6, 6)}}
    for message in pool.run(2, _refusal, operator="mlstm", **given):
        assert re.match(r"q: got 4, 6 steps on the 2 processes .*, expected 6, 6, by its lengths \(6, 6\)$", message)


def _dense_zigzag(group: dist.ProcessGroup) -> Tensor:
    T = 2 + 2 * dist.get_rank(group)
    return _operators(T)["mlstm"](context_parallel=ContextParallel(group, order="zigzag"))


def test_dense_parts_of_zigzag_may_differ(pool: Pool) -> None:
    """Two spans of one step on the first process surround two of two steps."""
    first, second = pool.run(2, _dense_zigzag)
    whole = _operators(6)["mlstm"]()
    torch.testing.assert_close(torch.cat([first[:, :1], second, first[:, 1:]], 1), whole)
