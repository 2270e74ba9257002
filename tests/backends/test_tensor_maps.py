"""The arguments of a launch do not depend on whether its TMA descriptors were encoded before. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

driver = pytest.importorskip("triton.backends.nvidia.driver")
pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)  # older Tritons

from tfla.backends.gpu.descriptors import MAX_ADDRESSES, EncodedDescriptor, cache_descriptors, with_descriptor_cache  # noqa: E402

KIND = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
SIGNATURE = {"x": "tensordesc<fp16[64, 64]>", "number": "i32", "y": "tensordesc<fp16[64, 64]>", "pointer": "*fp32"}
BASE = 13 if hasattr(driver, "_BASE_ARGS_FORMAT_LEN") else 15  # what a launcher takes before the kernel's arguments


class Descriptor(SimpleNamespace):
    """A TMA descriptor of a tensor, like those of the kernels' launches."""

    def __init__(self, base: torch.Tensor, remembered: dict[int, EncodedDescriptor]) -> None:
        super().__init__(
            base=base, shape=[*base.shape], strides=[*base.stride()], padding="zero", round_f32_to_tf32=False,
            block_shape=[64, 64], layout=None, remembered=remembered,
        )  # fmt: skip


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that were encoded, of a driver that needs no GPU."""
    recorded: list[int] = []

    def encode(address: int, *rest: Any) -> tuple[Any, ...]:
        recorded.append(address)
        return address, *map(str, rest)

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", SimpleNamespace(utils=utils), raising=False)
    return recorded


def launchers() -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """Triton's of a kernel with two descriptors, that which remembers, and what launches got."""
    launches: list[Any] = []
    plain = driver.wrap_handle_tensordesc(lambda *args: launches.append(args), SIGNATURE, [KIND, KIND])
    return plain, with_descriptor_cache(plain), launches


def launch(launcher: Callable[..., Any], *args: Any) -> None:
    launcher(*range(BASE), *args) if hasattr(driver, "_BASE_ARGS_FORMAT_LEN") else launcher(*range(BASE), args)


def test_same_arguments(encoded: list[int]) -> None:
    plain, ours, launches = launchers()
    x, y = torch.zeros(128, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.float16)
    of_x: dict[int, EncodedDescriptor] = {}
    of_y: dict[int, EncodedDescriptor] = {}
    launch(plain, Descriptor(x, of_x), 5, Descriptor(y, of_y), 7)
    launch(ours, Descriptor(x, of_x), 5, Descriptor(y, of_y), 7)
    assert encoded == 2 * [x.data_ptr(), y.data_ptr()]
    launch(ours, of_x[x.data_ptr()], 5, of_y[y.data_ptr()], 7)
    assert len(encoded) == 4, "encoded again"
    launch(ours, of_x[x.data_ptr()], 6, Descriptor(x, of_y), 8)
    launch(plain, Descriptor(x, {}), 6, Descriptor(x, {}), 8)
    first, second, third, fourth, fifth = [[str(x) for x in args] for args in launches]
    assert first == second == third != fourth == fifth


def test_remembers_so_many(encoded: list[int]) -> None:
    _, ours, _ = launchers()
    remembered: dict[int, EncodedDescriptor] = {}
    rows = torch.zeros(MAX_ADDRESSES + 9, 64, dtype=torch.float16)
    for row in rows:
        launch(ours, Descriptor(row[None], remembered), 5, Descriptor(row[None], {}), 7)
        assert row.data_ptr() in remembered
        assert len(remembered) <= MAX_ADDRESSES
    assert len(encoded) == 2 * len(rows)


def test_other_launchers_stay() -> None:
    def plain(*args: Any) -> None: ...

    for run in (SimpleNamespace(launch=plain), SimpleNamespace(launch=print), SimpleNamespace()):
        kernel, before = SimpleNamespace(run=run), vars(run).copy()
        cache_descriptors(kernel)
        assert vars(run) == before
