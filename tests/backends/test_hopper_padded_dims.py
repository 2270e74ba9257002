"""Tests of the head dims that the Hopper kernels support and pad to, and of the number of programs."""

from __future__ import annotations

import pytest

from tfla.backends.hopper.head_dims import DIMS, SMALL_HEADS, padded_head_dims


@pytest.mark.parametrize("dims", [*SMALL_HEADS, *((K, V) for K in DIMS for V in DIMS)], ids=str)
def test_dims_of_kernels_are_not_padded(dims: tuple[int, int]) -> None:
    assert padded_head_dims(*dims) == dims


@pytest.mark.parametrize(
    ("dims", "padded"),
    [
        ((32, 32), (64, 64)), ((40, 56), (64, 64)), ((56, 72), (64, 128)), ((72, 56), (128, 64)),
        ((72, 72), (128, 128)), ((96, 192), (128, 256)), ((64, 256), (128, 256)), ((160, 320), (256, 512)),
    ],
)  # fmt: skip
def test_others_are_padded_to_at_most_twice(dims: tuple[int, int], padded: tuple[int, int]) -> None:
    assert padded_head_dims(*dims) == padded


@pytest.mark.parametrize(
    "dims", [(16, 16), (24, 64), (32, 256), (56, 256), (100, 128), (128, 132), (2048, 128)], ids=str
)
def test_more_padding_and_unaligned_rows_are_refused(dims: tuple[int, int]) -> None:
    assert padded_head_dims(*dims) is None


@pytest.mark.parametrize("most", [1, 2, 33, 132])
def test_fewer_programs_would_need_more_rounds(most: int) -> None:
    host = pytest.importorskip("tfla.backends.hopper.host", exc_type=ImportError)
    for count in range(1, 5 * most + 2):
        programs, rounds = host.balanced_programs(count, most), -(-count // most)
        assert programs <= most
        assert -(-count // programs) == rounds
        assert programs == 1 or -(-count // (programs - 1)) > rounds
