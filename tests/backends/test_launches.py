"""Launches of a call like a former one take its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tfla.backends.triton import compiled
from tfla.backends.triton.compiled import Arguments, Launches, launch, static


class Kernel:
    """As Triton's: launching compiles, and gives what can be launched by itself."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look_up(*args: Any, num_warps: int, **constants: Any) -> Any:
            self.log.append((f"looked up {self.name}", grid, args, num_warps, constants))
            return Compiled(self.name, self.log)

        return look_up


class Compiled:
    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.log.append((self.name, grid, args))


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    compiled._kernels.cache_clear()


def test_kernels_are_looked_up_once_by_place() -> None:
    log: list[Any] = []
    one, two, x = Kernel("one", log), Kernel("two", log), torch.zeros(3)
    for _ in range(2):
        launch = Launches("like this")
        for kernel in (one, two, one):
            launch(kernel, (7, 2), x, 5, num_warps=4, WIDTH=64, BACK=True)
    at_first = [(f"looked up {name}", (7, 2), (x, 5), 4, {"WIDTH": 64, "BACK": True}) for name in ("one", "two", "one")]
    then = [(name, (7, 2, 1), (x.data_ptr(), 5, 64, True)) for name in ("one", "two", "one")]
    assert [entry[0] for entry in log] == [entry[0] for entry in (*at_first, *then)]
    assert log[3:] == then


@pytest.mark.parametrize("call", ["another", None])
def test_other_calls_look_up_again(call: str | None) -> None:
    log: list[Any] = []
    for sizes in ("like this", call, call):
        Launches(sizes)(Kernel("one", log), (1,), num_warps=4)
    assert [entry[0] for entry in log[:2]] == ["looked up one"] * 2
    assert log[2][0] == ("looked up one" if call is None else "one")


@pytest.mark.parametrize("call", ["like this", None])
def test_a_single_launch_asks_once(call: str | None) -> None:
    """For its arguments; the tensors are those of each call."""
    log: list[Any] = []
    given = torch.zeros(3), torch.ones(3)
    asked = []

    def arguments() -> Arguments:
        asked.append(True)
        return Kernel("one", log), (7, 2), (5, 0.5), {"WIDTH": 64, "num_warps": 4, "BACK": True}

    for x in given:
        launch(call, (x, x), arguments)
    constants = {"enable_fp_fusion": True, "WIDTH": 64, "BACK": True}
    first, second = (("looked up one", (7, 2), (x, x, 5, 0.5), 4, constants) for x in given)
    pointers = given[1].data_ptr(), given[1].data_ptr()
    assert len(asked) == (1 if call else 2)
    assert log[0] == first
    assert log[1] == (("one", (7, 2, 1), (*pointers, 5, 0.5, 64, True)) if call else second)


def test_what_distinguishes_tensors() -> None:
    x = torch.zeros(4, 8, 16)
    others = [x.half(), x[:2], x.transpose(0, 1), x.flatten()[1:-15].view(4, 2, -1)[:, :1], None]
    assert static(x) == static(torch.ones(4, 8, 16))
    assert len({static(x), *map(static, others)}) == 6
