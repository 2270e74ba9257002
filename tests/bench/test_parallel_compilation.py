"""Candidates of an autotuned kernel are all compiled before the first is timed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tfla.bench import parallel_compilation

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Kernel:
    """The part of a Triton kernel that an autotuner needs; a compilation leaves a file that names its process."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self, cache: Path) -> None:
        self.log, self.cache = [], cache

    @staticmethod
    def fn(x, n, BLOCK):
        pass

    def warmup(self, *, grid, x, n, BLOCK, num_warps, **rest):
        from triton.runtime._async_compile import active_mode

        def compile_it():
            made = self.cache / str(BLOCK)
            if BLOCK == 64:
                raise ValueError("cannot be compiled")
            if not made.exists():
                made.write_text(str(os.getpid()))

        active_mode.get().submit(BLOCK, compile_it, lambda kernel: None)

    def run(self, *args, BLOCK, **rest):
        self.log.append((BLOCK, sorted(int(made.name) for made in self.cache.iterdir())))


@pytest.mark.parametrize("own", [True, False], ids=["library says how to time", "Triton's default"])
def test_all_candidates_are_compiled_before_the_first_runs(
    own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton", minversion="3.5")
    from triton.runtime.autotuner import Autotuner

    kernel = Kernel(tmp_path)
    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (16, 32, 64)]

    def seconds(call, quantiles, **short):
        assert short == ({} if own else {"warmup": parallel_compilation.WARMUP, "rep": parallel_compilation.SAMPLES})
        call()
        return [1.0 / kernel.log[-1][0] + (kernel.log[-1][0] == 64)] * 3

    monkeypatch.setattr("triton.testing.do_bench", seconds)
    tuned = Autotuner(kernel, kernel.arg_names, configs, ["n"], None, None, do_bench=seconds if own else None)
    before = Autotuner.prune_configs
    with parallel_compilation.compiled_together():
        tuned.run(object(), n=3, grid=(1,), warmup=False)
        tuned.run(object(), n=3, grid=(1,), warmup=False)  # is not tuned again
    assert Autotuner.prune_configs is before
    made = [int((tmp_path / size).read_text()) for size in ("16", "32")]
    assert os.getpid() not in made
    assert [size for size, _ in kernel.log] == [16, 32, 64, 32, 32]  # those compared, then the best
    assert all(compiled == [16, 32] for _, compiled in kernel.log)
