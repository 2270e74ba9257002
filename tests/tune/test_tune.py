"""The prediction, measurement and storage of chunk sizes, and the calls that leave the choice open."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfla
from tfla._util.errors import UserError
from tfla.bench.stored import load
from tfla.bench.tune_command import TuneOptions
from tfla.bench.tuned_entries import entries
from tfla.cli import main
from tfla.measure.problem import Problem
from tfla.ops import tuned
from tfla.ops.tuned import SHIPPED, Entry, cpu_name, user_file
from tfla.tune import run as runner
from tfla.tune import store
from tfla.tune.choose import best, shortlist
from tfla.tune.config import TuneConfig
from tfla.tune.default import untuned
from tfla.tune.measure import Measured, measured
from tfla.tune.predict import Candidate, Machine, chunk_sizes, predict
from tfla.tune.run import Budget, known_machine, plan, tune

H100 = known_machine("H100")
SLOW = Machine("x", 1e11, 1e10, 2)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIG5 = Problem(8, 8192, 8, 256, 512)
SHAPE = ["--batch", "1", "--length", "160", "--heads", "1", "--dqk", "4", "--dhv", "4", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's file of the test's own."""
    monkeypatch.setenv("TFLA_CACHE_DIR", str(tmp_path / "cache"))
    tuned.clear_entries()
    yield user_file()
    tuned.clear_entries()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose rates need not be measured."""
    monkeypatch.setattr(runner, "this_machine", lambda device: Machine(cpu_name(), 1e11, 1e10, 2))


def entry(**changes: Any) -> dict[str, Any]:
    row = Entry(cpu_name(), "chunkwise", "float32", True, 1, 160, 1, 4, 4, "segmented", 96, False)
    return row._replace(**changes)._asdict()


def inputs(T: int = 160) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(T)
    return (*(torch.randn(1, T, 1, 4) for _ in range(3)), *(torch.randn(1, T, 1) for _ in range(2)))


def picked(*x: torch.Tensor, **options: Any) -> tuple[int, bool]:
    found = tfla.explain(*x, **options)
    return found.chunk_size, found.tuned


def test_the_papers_kernels_have_an_optimum() -> None:
    """FLOPs grow with the chunk, stored states shrink: Figure 5."""
    times = [predict(FIG5, True, "triton", "tfla", L, H100).seconds for L in chunk_sizes(8192)]
    least = times.index(min(times))
    assert 0 < least < len(times) - 1
    assert times[:least] == sorted(times[:least], reverse=True)
    assert times[least:] == sorted(times[least:])


def test_memory_shrinks_with_the_chunk() -> None:
    for backend, kernel in (("triton", "tfla"), ("triton", "fused"), ("hopper", "fused"), ("chunkwise", "segmented")):
        sizes = [predict(FIG5, True, backend, kernel, L, H100).peak_bytes for L in chunk_sizes(8192)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 2 * sizes[-1]


def test_segments_fill_a_gpu_that_one_sequence_leaves_idle() -> None:
    one = Problem(1, 65536, 4, 128, 256)
    whole, parts = (predict(one, False, "hopper", "fused", L, H100).seconds for L in (65536, 2048))
    assert parts < whole / 4
    full = Problem(66, 8192, 4, 128, 256)
    whole, parts = (predict(full, False, "hopper", "fused", L, H100).seconds for L in (8192, 2048))
    assert whole < parts


def test_chunk_sizes() -> None:
    assert chunk_sizes(300) == [64, 128, 256, 300]
    assert chunk_sizes(64) == [64]
    assert chunk_sizes(5) == [5]


def stored(suite: str) -> list[tuple[dict[str, Any], Candidate]]:
    """Return the measured times of this library's kernels, forward and backward, with the predicted ones."""
    result = next(result for result in load(RESULTS).values() if result["suite"] == suite)
    gpu = Machine("", result["rates"]["gemm"]["rested"], result["rates"]["copy"]["rested"], 132)
    found = []
    for row in result["rows"]:
        if row["name"].startswith("tfla") and "seconds" in row and row["direction"] == "forward + backward":
            backend, kernel = row["implementation"].split()
            p = Problem(*(row[name] for name in ("B", "T", "H", "dqk", "dhv")))
            L = int(row["details"].get("segment") or row["details"]["chunk"])
            found.append((row, predict(p, "exp" in row["name"], backend, kernel, L, gpu)))
    return found


@pytest.mark.parametrize("suite", ["fig4", "fig5"])
def test_predictions_beside_what_was_measured(suite: str) -> None:
    """Times within a factor of 2.5, memory within a tenth or 400 MiB, and the faster kernel is the faster one."""
    rows = stored(suite)
    assert len(rows) > 20
    for row, found in rows:
        assert 0.4 < row["seconds"] / found.seconds < 2.5, (row["name"], row["x"], found)
        assert abs(row["peak_bytes"] - found.peak_bytes) < max(0.1 * row["peak_bytes"], 400 * 2**20)
    fastest, first = (min(rows, key=key) for key in (lambda r: r[0]["seconds"], lambda r: r[1].seconds))
    assert fastest[1].implementation == first[1].implementation


def candidate(L: int, seconds: float, size: int, kernel: str = "a") -> Candidate:
    return Candidate("x", kernel, L, seconds, size)


def test_shortlist() -> None:
    """The best of each kernel that fit, and the default, which may not."""
    found = [candidate(64, 3, 90), candidate(128, 2, 50), candidate(256, 1, 10), candidate(64, 9, 10, "b")]
    assert shortlist(found, ("a", 64), 60, 1) == [found[0], found[2], found[3]]
    assert shortlist(found, ("a", 256), None, 2) == found[1:]


def test_best() -> None:
    """Fastest within the limit; of those equally fast the smallest."""
    found = [candidate(64, 1.0, 90), candidate(128, 1.01, 50), candidate(256, 2.0, 10)]
    assert best(found, None) == found[1]
    assert best(found, 40) == found[2]
    assert best(found, 5) is None
    failed = Measured(found[0], float("inf"), None, "out of memory")
    counted = Measured(found[2], 5.0, 60)
    assert best([failed, counted], None) == counted
    assert best([failed, counted], 40) is None


@pytest.mark.usefixtures("quick")
def test_tuned_shapes_are_used(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = inputs()
    before = picked(*x)
    assert not before[1]
    assert main(["tune", *SHAPE, "--repeats", "2"]) == 0
    said = capsys.readouterr().out
    assert "measured ms" in said
    assert f"kept in {cache}" in said
    (row,) = json.loads(cache.read_text())["entries"]
    assert row["seconds"] > 0
    assert picked(*x) == (row["chunk_size"], True)
    assert picked(*inputs(161)) == (before[0], False)
    assert picked(*x, chunk_size=32) == (32, False)
    assert picked(*x, input_gate="sigmoid")[1] is False


@pytest.mark.usefixtures("quick")
def test_nothing_is_measured_twice_in_silence(cache: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    store.add(cache, [entry() | {"date": "2020-01-01"}])
    monkeypatch.setattr(runner, "measured", lambda *args: pytest.fail("measured again"))
    assert main(["tune", *SHAPE]) == 0
    assert "measured on 2020-01-01" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        main(["tune", *SHAPE, "--again"])


@pytest.mark.usefixtures("quick")
def test_prediction_alone(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "measured", lambda *args: pytest.fail("measured"))
    assert main(["tune", *SHAPE, "--predict"]) == 0
    assert main(["tune", "--accelerator", "H100", "--memory-limit", "2", "--heads", "8", "--dqk", "256"]) == 0
    assert capsys.readouterr().out.count("by prediction alone") == 2
    assert main(["tune", "--accelerator", "H100", "--memory-limit", "0.001"]) == 1
    assert "nothing is within 0.00 GiB" in capsys.readouterr().out
    wide = ["tune", "--accelerator", "A100", "--dqk", "960"]
    assert main([*wide, "--kernel", "fused"]) == 1
    assert (
        "kernel: 'fused' of backend 'triton' cannot run these inputs: it takes dqk up to 512" in capsys.readouterr().err
    )
    assert main(wide) == 0
    assert "triton tfla" in capsys.readouterr().out
    assert not cache.exists()


def test_a_kernel_that_was_asked_for(cache: Path) -> None:
    """Its entry serves calls that name it, and no others."""
    store.add(cache, [entry(asked=True, chunk_size=64)])
    x = inputs()
    assert picked(*x, kernel="segmented", backend="chunkwise") == (64, True)
    assert picked(*x)[1] is False
    store.add(cache, [entry(chunk_size=128)])
    assert picked(*x) == (128, True)


def test_results_do_not_change(cache: Path) -> None:
    x = [t.requires_grad_() for t in inputs()]
    plain = torch.autograd.grad(tfla.mlstm(*x).sum(), x)
    store.add(cache, [entry(chunk_size=32)])
    assert picked(*x) == (32, True)
    for a, b in zip(torch.autograd.grad(tfla.mlstm(*x).sum(), x), plain, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_compiled(cache: Path) -> None:
    """Traced for one shape it is used; one graph for all lengths leaves it out."""
    store.add(cache, [entry(chunk_size=32)])
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        sizes = [n.args[12] for n in graph.graph.nodes if "attend" in str(n.target)]
        calls.extend(sizes)
        return graph.forward

    for dynamic in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(tfla.mlstm, fullgraph=True, dynamic=dynamic, backend=backend)
        for T in (160, 161):
            x = inputs(T)
            torch.testing.assert_close(compiled(*x), tfla.mlstm(*x), rtol=1e-4, atol=1e-5)
    default = picked(*inputs(161))[0]
    assert calls == [32, default, default]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "entries": 3}',
                                  '{"version": 1, "entries": [{"device": 1}]}'])  # fmt: skip
def test_a_broken_file_is_reported_and_left_out(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.warns(UserWarning, match=r"chunk_sizes\.json is left out"):
        h = tfla.mlstm(*inputs())
    assert h.shape == (1, 160, 1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfla.mlstm(*inputs())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kernel": "scan"}, r"kernel: got 'scan', backend 'chunkwise' has 'segmented'"),
        ({"backend": "metal"}, r"backend: got 'metal', allowed are .*'chunkwise'"),
        ({"backend": "triton", "kernel": "xl_chunk"}, r"kernel: got 'xl_chunk', backend 'triton' has 'fused', 'tfla'"),
    ],
    ids=["kernel", "backend", "kernel of a GPU"],
)
def test_an_entry_of_what_there_is_not_is_reported_once_and_left_out(
    cache: Path, change: dict[str, Any], why: str
) -> None:
    """Other entries of the file are used."""
    store.add(cache, [entry(), entry(T=320)])
    text = json.loads(cache.read_text())
    text["entries"][0].update(change)
    cache.write_text(json.dumps(text))
    tuned.clear_entries()
    with pytest.warns(UserWarning, match=rf"an entry of .*chunk_sizes\.json is left out: {why}"):
        h = tfla.mlstm(*inputs())
    assert h.shape == (1, 160, 1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picked(*inputs())[1] is False
        assert picked(*inputs(320))[1] is True
        tfla.mlstm(*inputs())


@pytest.mark.usefixtures("quick")
def test_a_broken_file_is_written_anew(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.parent.mkdir()
    cache.write_text("{")
    assert main(["tune", *SHAPE, "--repeats", "1"]) == 0
    assert "cannot be used and is replaced" in capsys.readouterr().out
    assert len(tuned.parse(cache.read_text())) == 1


def test_a_file_that_cannot_be_written(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot be written"):
        store.add(cache, [entry()])


def test_entries_replace_those_of_the_same_shape(cache: Path) -> None:
    store.add(cache, [entry(), entry(T=320)])
    store.add(cache, [entry(chunk_size=64)])
    assert [(e.T, e.chunk_size) for e in tuned.parse(cache.read_text())] == [(320, 96), (160, 64)]
    assert [e.T for e in tuned.load()][:2] == [320, 160]


def test_the_shipped_table() -> None:
    """Every shape has one entry for each gate and dtype, within a tenth of the fastest that is stored."""
    read = tuned.parse(SHIPPED.read_text(encoding="utf-8"))
    assert len({e.key for e in read}) == len(read)
    assert {(e.T, e.H, e.dqk, e.dhv, e.normalize) for e in read} >= {(8192, 8, 256, 512, n) for n in (True, False)}
    best_of = {store.entry(row).key: row["seconds"] for row in entries(RESULTS)}
    for row in json.loads(SHIPPED.read_text(encoding="utf-8"))["entries"]:
        assert row["chunk_size"] <= row["T"]
        assert row["seconds"] <= 1.1 * best_of[store.entry(row).key]


def benchmark(*rows: tuple[str, str, int, float], date: str = "2026-01-02") -> dict[str, Any]:
    """A result with rows of name, implementation, chunk size, seconds; a larger chunk takes less memory."""
    shape = {"B": 8, "T": 8192, "H": 8, "dqk": 256, "dhv": 512, "direction": "forward + backward"}
    names = ("name", "implementation", "x", "seconds")
    return {
        "suite": "fig5", "axis": "chunk size", "config": {"repeats": 1},
        "environment": {"device": "a GPU", "date": date, "versions": {"torch": "2.11.0"}},
        "rows": [
            shape | dict(zip(names, row, strict=True)) | {"details": {"chunk": row[2]}, "peak_bytes": 2**40 // row[2]}
            for row in rows
        ],
    }  # fmt: skip


def test_winners_of_stored_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest of a backend, of equally fast ones the smallest; none of packed sequences, of what ran alone, nor the
    largest of several chunk sizes, beyond which something may be faster."""
    rows = [("tfla mLSTMexp", "triton fused", 64, 3.0), ("tfla mLSTMexp, triton tfla", "triton tfla", 256, 1.0),
            ("tfla mLSTMexp, triton tfla", "triton tfla", 512, 1.01), ("tfla mLSTMexp, x y", "x y", 64, 0.1),
            ("tfla mLSTMexp, triton tfla", "triton tfla", 1024, 2.0), ("fla simple_gla chunk", "fla", 64, 0.1),
            ("tfla mLSTMexp, packed", "triton fused", 128, 0.1),
            ("tfla mLSTMsig", "triton fused", 64, 1.0), ("tfla mLSTMsig", "triton fused", 128, 0.5)]  # fmt: skip
    (tmp_path / "fig5.json").write_text(json.dumps(benchmark(*rows)))
    target = tmp_path / "table" / "chunk_sizes.json"
    assert main(["tune", "--stored", str(tmp_path), "--file", str(target)]) == 0
    assert f"1 shapes of {tmp_path} kept in {target}" in capsys.readouterr().out
    (found,) = tuned.parse(target.read_text())
    assert (found.device, found.backend, found.kernel, found.chunk_size, found.normalize) == (
        "a GPU", "triton", "tfla", 512, True,
    )  # fmt: skip
    assert (found.B, found.T, found.H, found.dqk, found.dhv, found.dtype) == (8, 8192, 8, 256, 512, "bfloat16")
    again = benchmark(("tfla mLSTMexp", "triton fused", 64, 0.9), date="2026-01-03")
    (tmp_path / "fig5_again.json").write_text(json.dumps(again))
    (entry,) = entries(tmp_path)
    assert (entry["kernel"], entry["seconds"], entry["date"], entry["among"]) == ("fused", 0.9, "2026-01-03", 4)
    assert main(["tune", "--stored", str(tmp_path / "table")]) == 1
    assert "has no results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "variable", "value", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "/x", "/x/tfla/chunk_sizes.json"),
        ("linux", "TFLA_CACHE_DIR", "/y", "/y/chunk_sizes.json"),
        ("darwin", "HOME", "/home/me", "/home/me/Library/Caches/tfla/chunk_sizes.json"),
        ("win32", "LOCALAPPDATA", "/local", "/local/tfla/chunk_sizes.json"),
        ("linux", "HOME", "/home/me", "/home/me/.cache/tfla/chunk_sizes.json"),
    ],
)
def test_where_the_user_file_is(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, expected: str
) -> None:
    for name in ("TFLA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv(variable, value)
    assert user_file().as_posix() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "0"], "heads: got 0"),
        (["--length", "100000000000000000000"], "length: got 1"),
        (["--memory-limit", "nan"], "memory-limit: got nan"),
        (["--budget", "0"], "budget: got 0.0"),
        (["--budget", "nan"], "budget: got nan"),
        (["--stored", "nowhere"], "stored: got 'nowhere'"),
        (["--device", "foo"], "device: got 'foo'"),
        (["--memory-limit", "-1"], "memory-limit: got -1"),
        (["--suite", "fig9"], "suite: got 'fig9'"),
        (["--accelerator", "Z80"], "accelerator: got 'Z80'"),
        (["--accelerator", "H100", "--backend", "cuda"], "backend: got 'cuda'"),
        (["--accelerator", "H100", "--kernel", "x"], "kernel: got 'x'"),
        (["--predict", "--backend", "reference"], "nothing to tune"),
        (["--predict", "--device", "cpu", "--backend", "hopper"], "'hopper' cannot run these inputs"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *options]) == 1
    assert message in capsys.readouterr().err


def test_suites() -> None:
    shapes = TuneOptions(suite=("fig4", "fig5")).problems
    assert len(shapes) == 8 + 1
    assert FIG5 in shapes


def test_an_error_is_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TuneConfig(batch=1, length=96, heads=1, dqk=4, dhv=4, dtype="float32", repeats=1)
    p = Problem(1, 96, 1, 4, 4, dtype="float32", device="cpu")

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("tfla.tune.measure.mlstm", broken)
    found = tune(plan(p, "exp", config, SLOW), config, Budget(60.0), lambda candidate: None)
    assert found.winner is None
    assert all("out of memory" in (m.error or "") for m in found.measured)
    assert "no candidate could be measured: RuntimeError: out of memory" in found.text(SLOW, config)


class Clock:
    """Time that passes where a candidate is measured, so many times as long as was predicted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> None:
        self.now, self.factor, self.asked = 0.0, factor, list[Candidate]()
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(runner, "measured", self.measured)

    def measured(self, p: Problem, gate: str, c: Candidate, repeats: int, left: float) -> Measured:
        assert left > 0
        self.asked.append(c)
        self.now += min(self.factor * 10 * c.seconds, max(left, 2 * self.factor * c.seconds))
        return Measured(c, self.factor * c.seconds, None)


@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_the_budget_bounds_the_time(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The default first, then by merit; what is left out is said. However far predictions are off, it is two calls of
    one candidate over at most."""
    p = Problem(1, 8192, 2, 64, 64, dtype="float32", device="cpu")
    config = TuneConfig(budget=1.0)
    found = plan(p, "exp", config, SLOW)
    one = found.few[0].seconds
    assert (found.few[0].kernel, found.few[0].chunk_size) == found.default
    merits = [(c.seconds, c.peak_bytes) for c in found.few[1:]]
    assert merits == sorted(merits)
    for calls, expected in ((1, 0), (5, 1), (25 * factor, 3), (1000 * factor, len(found.few))):
        clock = Clock(monkeypatch, factor)
        config = TuneConfig(budget=calls * one)
        budget = Budget(config.budget)
        done = tune(found, config, budget, lambda candidate: None)
        assert clock.asked == found.few[:expected]
        assert [m.candidate for m in done.measured] == clock.asked
        assert done.left_out == found.few[expected:]
        assert clock.now <= config.budget + 2 * factor * max(c.seconds for c in found.few)
        text = done.text(SLOW, config)
        assert ("not measured within the budget" in text) == bool(done.left_out)
        if expected == 0:
            assert text.endswith("nothing is kept: nothing was measured")
        elif expected == 1:
            assert text.endswith("nothing is kept: only one candidate was measured")


def test_a_long_call_is_timed_as_often_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds a call: down to one sample, which on a CPU may be the first call."""
    clock = Clock(monkeypatch)
    counted = 0

    class Slow:
        def series(self, call: Callable[[], Any], count: int) -> float:
            nonlocal counted
            counted += count
            clock.now += 10.0 * count
            return 10.0 * count

        def now(self) -> float:
            return clock.now

        def rest(self, seconds: float) -> None: ...

    monkeypatch.setattr("tfla.tune.measure.clock_of", lambda device: Slow())
    p = Problem(1, 96, 1, 4, 4, dtype="float32", device="cpu")
    c = Candidate("chunkwise", "segmented", 32, 10.0, 1)
    for left, calls in ((5.0, 1), (15.0, 2), (55.0, 5), (1000.0, 2 + 1 + 2 + 5)):
        counted = 0
        assert measured(p, "exp", c, 10, left).seconds == 10.0
        assert counted == calls, left


@pytest.mark.usefixtures("quick")
def test_an_estimate_comes_first_and_a_short_budget_keeps_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def measured(p: Problem, gate: str, c: Candidate, repeats: int, left: float) -> Measured:
        nonlocal said
        said += capsys.readouterr().err
        return Measured(c, 1.0, None)

    monkeypatch.setattr(runner, "measured", measured)
    assert main(["tune", *SHAPE, "--budget", "30"]) == 0
    assert re.match(
        r"measuring \d candidates of 1 shape takes about 0 s by prediction, at most 30 s \(--budget\)", said
    )
    assert main(["tune", *SHAPE, "--again", "--budget", "1e-9"]) == 1
    out, err = capsys.readouterr()
    assert "nothing is kept: nothing was measured" in out
    assert err.startswith("measuring ")


def test_the_default_is_what_a_call_takes(cache: Path) -> None:
    """Whatever the user has tuned: what that is worth is measured against what comes without it."""
    for T in (64, 160, 5000):
        p = Problem(1, T, 1, 4, 4, dtype="float32", device="cpu")
        taken = tfla.explain(*inputs(T))
        assert untuned(p, True, None, None, None)[1:] == (taken.kernel, min(taken.chunk_size, T))
    store.add(cache, [entry(chunk_size=32)])
    assert picked(*inputs()) == (32, True)
    assert untuned(Problem(1, 160, 1, 4, 4, dtype="float32", device="cpu"), True, None, None, None)[2] == 160


def test_the_default_of_a_gpu_that_is_not_here() -> None:
    """The entry that comes with the library where it has one, else the backend's choice by the GPU's processors."""
    for e in tuned.parse(SHIPPED.read_text()):
        p = Problem(e.B, e.T, e.H, e.dqk, e.dhv, dtype=e.dtype)
        backend, *rest = untuned(p, e.normalize, e.backend, e.kernel if e.asked else None, "H200")
        assert (backend.name, *rest) == (e.backend, e.kernel, e.chunk_size)
    few = Problem(1, 65536, 4, 128, 256)
    assert untuned(few, True, None, None, "A100")[0].name == "triton"
    assert 64 <= untuned(few, True, None, None, "A100")[2] < 65536
    assert untuned(few, True, None, None, "V100")[0].name == "chunkwise"  # which has no bfloat16


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("options", [SHAPE, ["--stored", str(RESULTS)]])
def test_a_file_that_cannot_be_written_is_found_before_measuring(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "measured", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(runner, "this_machine", lambda device: pytest.fail("measured"))
    (tmp_path / "file").write_text("no folder")
    for target in (tmp_path, tmp_path / "file" / "x.json"):
        assert main(["tune", *options, "--file", str(target)]) == 1
        assert re.fullmatch(rf"tfla: error: file: {target} cannot be written: .*\n", capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_the_memory_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "measured", lambda *args: pytest.fail("measured"))
    assert main(["tune", "--length", "1000000000", "--device", "cpu"]) == 1
    assert "the inputs alone take" in capsys.readouterr().err
    monkeypatch.setattr(runner, "memory_of", lambda device: 2**20)
    assert main(["tune", *SHAPE, "--length", "10000", "--device", "cpu"]) == 1
    out, _ = capsys.readouterr()
    assert re.search(r"nothing is kept: no candidate could be measured: needs about 0.00 GiB, there are 0.00", out)
