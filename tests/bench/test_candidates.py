"""Candidates of an autotuned kernel are all compiled before the first is timed."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from tfla.bench import candidates

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Kernel:
    """As much of a Triton kernel as an autotuner needs; compiling ends when both candidates have begun."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self) -> None:
        self.log, self.both = [], threading.Barrier(2)

    @staticmethod
    def fn(x, n, BLOCK):
        pass

    def warmup(self, *, grid, x, n, BLOCK, num_warps, **rest):
        from triton.runtime._async_compile import active_mode

        def compile_it():
            self.both.wait(timeout=20)
            self.log.append(("compiled", BLOCK))

        active_mode.get().submit(BLOCK, compile_it, lambda kernel: None)

    def run(self, *args, BLOCK, **rest):
        self.log.append(("ran", BLOCK))


@pytest.mark.parametrize("own", [True, False], ids=["library says how to time", "Triton's default"])
def test_all_candidates_are_compiled_before_the_first_runs(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", minversion="3.5")
    from triton.runtime.autotuner import Autotuner

    kernel = Kernel()
    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (16, 32)]

    def seconds(call, quantiles, **short):
        assert short == ({} if own else {"warmup": candidates.WARMUP, "rep": candidates.SAMPLES})
        call()
        return [1.0 / kernel.log[-1][1]] * 3

    monkeypatch.setattr("triton.testing.do_bench", seconds)
    tuned = Autotuner(kernel, kernel.arg_names, configs, ["n"], None, None, do_bench=seconds if own else None)
    before = Autotuner.prune_configs
    with candidates.compiled_together():
        tuned.run(object(), n=3, grid=(1,), warmup=False)
        tuned.run(object(), n=3, grid=(1,), warmup=False)  # is not tuned again
    assert Autotuner.prune_configs is before
    assert sorted(kernel.log[:2]) == [("compiled", 16), ("compiled", 32)]
    assert kernel.log[2:] == [("ran", 16), ("ran", 32), ("ran", 32), ("ran", 32)]
