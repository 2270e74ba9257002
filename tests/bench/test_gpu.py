"""`tfla bench gpu`: runs on the CPU, implementations that fail, the page and the figures."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tfla
from tfla.bench import baselines, gpu, gpu_report, stored
from tfla.bench.commands import bench
from tfla.bench.entries import Entry
from tfla.bench.options import GpuBench, parse
from tfla.bench.suites import SUITES, Suite
from tfla.bench.worker import serve
from tfla.bench.worker_pool import Worker, WorkerDied
from tfla.measure import operator
from tfla.measure.errors import describe_error
from tfla.measure.problem import BOTH, FORWARD, STEP, Problem
from tfla.measure.roofline import backward_bytes, forward_bytes, step_bytes

QUICK = ["--device", "cpu", "--repeats", "2", "--warmup", "1", "--pause", "0", "--sustained", "0.001"]
RATES = {"copy": {"rested": 4e12, "sustained": 3e12}, "gemm": {"rested": 8e14, "sustained": 5e14}}


@pytest.fixture
def one_thread(monkeypatch):
    """Let the processes that a run starts use one thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def fake_suite(*makers: str, xs=(1, 2, 3)) -> Suite:
    entries = tuple(Entry(f"baseline {name}", f"fakes:{name}", needs="torch") for name in makers)
    return Suite("Fakes", "T", xs, lambda T: Problem(1, T, 1, 2, 2, dtype="float32"), entries)


def test_failing_implementations_are_rows_that_say_how(one_thread, capfd):
    """Real processes: one implementation raises in its backward, one aborts, one is not installed."""
    suite = fake_suite("half", "aborts", xs=(4,))
    absent = Entry("baseline absent", "fakes:works", needs="no_such_package")
    suite = replace(suite, entries=(*suite.entries, absent))
    result = gpu.run(GpuBench("fakes", device="cpu", repeats=2, warmup=1, pause=0, sustained=0), suite)
    rows = {(r["name"], r.get("direction")): r for r in result["rows"]}
    assert rows["baseline half", FORWARD]["samples"] == 2
    assert rows["baseline half", BOTH]["error"] == "NotImplementedError: no gradient here"
    assert "SIGABRT: LLVM ERROR: cannot select" in rows["baseline aborts", FORWARD]["error"]
    assert rows["baseline aborts", BOTH]["error"] == "not run: its process had ended"
    assert rows["baseline absent", None]["error"] == "not installed (no_such_package)"
    assert "SIGABRT" in capfd.readouterr().out


def test_a_run_its_page_and_its_figure(one_thread, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tyro")
    out = tmp_path / "results" / "smoke.json"
    assert bench(["gpu", "smoke", *QUICK, "--only", "sig", "--lengths", "48", "100", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 4
    assert result["environment"]["versions"]["torch"] == torch.__version__
    for row in result["rows"]:
        assert row["min"] <= row["seconds"] <= row["max"]
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["sustained_seconds"] > 0
        assert f"{row['seconds'] * 1e3:.3f} ms" in printed

    page = tmp_path / "docs" / "performance.md"
    assert bench(["report", "--results", str(out.parent), "--out", str(page)]) == 0
    text = page.read_text()
    assert "| forward + backward, ms, sustained, by T | 48 | 100 |" in text
    assert gpu_report.milliseconds(result["rows"][0]["seconds"]) in text
    assert "By default tfla mLSTMsig is chunkwise" in text
    assert "--only sig --lengths 48 100 --repeats 2" in text
    assert "![" in text
    assert (page.parent / "img" / "smoke.png").read_bytes().startswith(b"\x89PNG")


class FakeWorker:
    """Answers jobs without a process."""

    def __init__(self, answer):
        self.answer, self.jobs = answer, []

    def ask(self, job, limit):
        self.jobs.append((job, limit))
        yield from self.answer(job)

    def stop(self):
        pass


def rows_of(suite: Suite, answer, **options) -> list[dict]:
    run = gpu.Run(GpuBench("fakes", device="cpu", **options), suite, lambda text: None)
    run.rates = RATES
    run.pool.of = lambda key: FakeWorker(answer)
    return list(run.timed_rows(suite.entries[0]))


def test_a_crash_in_the_backward_keeps_the_forward():
    def answer(job):
        yield {"direction": FORWARD, "seconds": 1.0}
        raise WorkerDied("the process ended with SIGSEGV")

    rows = rows_of(fake_suite("works", xs=(7,)), answer)
    assert rows[0]["seconds"] == 1.0
    assert rows[1] == {"name": "baseline works", "x": 7, "direction": BOTH, "error": "the process ended with SIGSEGV"}


def test_after_two_crashes_in_a_row_an_implementation_is_left_alone():
    tried = []

    def answer(job):
        tried.append(job["problem"]["T"])
        if job["problem"]["T"] != 2:
            raise WorkerDied("the process ended with SIGABRT")
        yield from ({"direction": d, "seconds": 1.0} for d in job["directions"])

    rows = rows_of(fake_suite("works", xs=(1, 2, 3, 4, 5)), answer)
    assert tried == [1, 2, 3, 4]
    assert {r["error"] for r in rows if r["x"] == 5} == {"not run: its process ended at 3 and 4"}
    assert len(rows) == 10


def test_a_spent_budget_is_said_in_every_row_that_is_missing():
    rows = rows_of(fake_suite("works"), lambda job: iter(()), budget=0)
    assert len(rows) == 6
    assert {r["error"] for r in rows} == {"not run: the budget was spent"}


def test_a_short_budget_shortens_the_samples():
    run = gpu.Run(GpuBench("fakes", budget=100, patience=3.0), fake_suite("works"), lambda text: None)
    run.waiting = 1
    assert run.sampling() == GpuBench("fakes").sampling
    run.waiting = 100  # half a second for each direction
    assert run.sampling().patience == pytest.approx(0.3, rel=0.01)


def test_a_configuration_that_takes_too_long_is_given_up(one_thread):
    run = gpu.Run(GpuBench("fakes", device="cpu", limit=1.0), fake_suite("hangs", xs=(1,)), lambda text: None)
    with run.pool:
        forward, both = run.timed_rows(run.suite.entries[0])
    assert forward["error"] == "stopped after 1 s"
    assert both["error"] == "not run: its process had ended"


def test_all_compile_beforehand_and_other_libraries_are_timed_in_a_new_process():
    """One whose process dies while it compiles does not keep the others from it; one that compiles at every
    configuration has a process for each."""
    run = gpu.Run(GpuBench("fakes"), fake_suite("works", "aborts", xs=(1, 2)), lambda text: None)
    ours = Entry("tfla mLSTMsig", "fakes:works")
    each = Entry("baseline everywhere", "fakes:works", needs="fakes", each=True)
    workers, dismissed = {}, []

    def answer(job):
        assert job["only_compile"]
        if job["make"] == "fakes:aborts":
            raise WorkerDied("the process ended with SIGABRT")
        yield from ()

    run.pool.of = lambda key: workers.setdefault(key, FakeWorker(answer))
    run.pool.dismiss = dismissed.append
    run.compile([ours, each, *run.suite.entries])
    assert {key: [job["problem"]["T"] for job, _ in w.jobs] for key, w in workers.items()} == {
        "tfla mLSTMsig": [1, 2], "baseline works (1, 2)": [1, 2], "baseline aborts (1, 2)": [1],
        "baseline everywhere (1,)": [1], "baseline everywhere (2,)": [2],
    }  # fmt: skip
    assert set(dismissed) == set(workers) - {"tfla mLSTMsig"}
    assert all(limit <= gpu.COMPILING_SHARE * run.config.budget for w in workers.values() for _, limit in w.jobs)


def test_the_kernel_that_the_library_picks_is_not_timed_twice():
    suite = SUITES["fig4"]
    run = gpu.Run(GpuBench("fig4"), suite, lambda text: None)
    named = next(e for e in suite.entries if e.name == "tfla mLSTMsig, triton fused")
    assert not run.repeats(named)
    run.defaults["tfla mLSTMsig"] = {"triton fused"}
    assert run.repeats(named)
    run.defaults["tfla mLSTMsig"] = {"triton fused", "chunkwise segmented"}
    assert not run.repeats(named)


def test_a_process_that_ends_while_it_is_killed_is_no_error(monkeypatch):
    """While another thread waits for a process, poll says that it runs, even if that thread has just seen its end."""
    worker = Worker()
    worker.kill()
    worker._process.wait()
    monkeypatch.setattr(worker._process, "poll", lambda: None)
    worker.stop()


def test_implementations_that_fill_the_device_do_not_compile_side_by_side(monkeypatch):
    jobs = []

    def answer(job):
        jobs.append(job["only_compile"])
        yield {"direction": STEP, "seconds": 0.5, "operator_seconds": 0.1}

    suite = replace(fake_suite("works", xs=(4,)), directions=(STEP,), alone=True)
    run = gpu.Run(GpuBench("fakes"), suite, lambda text: None)
    run.pool.of = lambda key: FakeWorker(answer)
    (row,) = run.rows(list(suite.entries))
    assert jobs == [False]
    assert (row["tokens_per_second"], row["operator_share"]) == (4 / 0.5, 0.1 / 0.5)


def test_running_out_of_memory_is_said_in_the_same_words_every_time():
    assert describe_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) == "out of memory"
    assert describe_error(ValueError("\n  no such thing\nbut others")) == "ValueError: no such thing"


def test_head_dims_of_the_suite():
    suite = SUITES["dims"]
    found = {(p.dqk, p.dhv) for e in suite.entries for p in (suite.problem(e, x, "cuda") for x in suite.xs)}
    named = {(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)}
    assert found == named | {(32, 64)}
    assert {p.B * p.T for p in (suite.problem(e, x, "cuda") for e in suite.entries for x in suite.xs)} == {65_536}


def test_mamba_kernels_without_the_extension_of_their_package(tmp_path, monkeypatch):
    for folder, text in (("", "import selective_scan_cuda"), ("ops", ""), ("ops/triton", "")):
        (tmp_path / "mamba_ssm" / folder).mkdir(exist_ok=True)
        (tmp_path / "mamba_ssm" / folder / "__init__.py").write_text(text)
    scan = "def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size): return x * (dt * A)[..., None]"
    (tmp_path / "mamba_ssm" / "ops" / "triton" / "ssd_combined.py").write_text(scan)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        work = baselines.mamba2(Problem(1, 4, 8, 16, 2, dtype="float32", device="cpu"), groups=2)
        assert work.run(*work.inputs).shape == (1, 4, 8, 2)
        assert work.inputs[3].shape == (1, 4, 2, 16)
    finally:  # monkeypatch would put the modules back at its end, and transformers would take them for the package
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]


def tiny(problem: Problem) -> dict:
    """Sizes that a CPU computes in no time, in float32."""
    return {
        "B": 1, "T": 64, "H": 2, "dqk": 16, "dhv": 16, "chunk_size": problem.chunk_size, "dtype": "float32",
        "device": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("make", ["mlstm", "mamba2", "step", "copy_state"])
def test_own_implementations_run(make):
    rows = []
    module = "tfla.measure.operator" if make == "mlstm" else "tfla.bench.implementations"
    options = {"copy_state": {}, "mamba2": {"groups": 1}}.get(make, {"gate": "exp"})
    directions = [FORWARD, BOTH] if make in ("mlstm", "mamba2") else [FORWARD]
    job = {
        "kind": "time", "make": f"{module}:{make}", "options": options, "directions": directions,
        "problem": tiny(SUITES["fig5"].at(32)) | ({"T": 3} if make == "step" else {}), "only_compile": False,
        "sustained": False, "host": False, "sampling": {"repeats": 1, "warmup": 1, "pause": 0},
    }  # fmt: skip
    serve(job, rows.append)
    assert rows.pop() == {"done": True}
    assert [r["direction"] for r in rows] == directions
    assert all(r["seconds"] > 0 for r in rows)
    if make == "mlstm":  # two chunks of 32: C and n, four bytes each
        assert {r["state_bytes"] for r in rows} == {2 * 2 * (16 * 16 + 16) * 4}


def test_packed_implementations_have_the_same_tokens():
    """The lengths sum up to all tokens, are mixed, and are the same each time; h is that of each sequence alone."""
    torch.manual_seed(0)
    problem = Problem(5, 12, 2, 4, 6, dtype="float64", device="cpu")
    (_, ends), (_, again) = (problem.packed([]) for _ in range(2))
    assert torch.equal(ends, again)
    assert (ends[0], ends[-1], len(ends)) == (0, 60, 6)
    assert len(set(ends.diff().tolist())) > 2
    work = operator.mlstm(problem, "exp", packed=True)
    h = work.run(*work.inputs)
    for a, b in itertools.pairwise(ends.tolist()):
        alone = tfla.mlstm(*(x[:, a:b] for x in work.inputs))
        torch.testing.assert_close(h[:, a:b], alone)


@pytest.mark.parametrize("own_step", [False, True])
def test_a_model_says_what_a_token_moves(own_step):
    """By hand: all weights but the embedding in, both blocks' states in and out; the roofline is that at the rate."""
    options = {"mixer": "mlstm_exp", "blocks": 2, "vocab": 50, "own_step": own_step}
    problem = {"B": 3, "T": 1, "H": 2, "dqk": 8, "dhv": 16, "dtype": "float32", "device": "cpu"}
    rows = []
    job = {
        "kind": "time", "make": "tfla.bench.generation:decode", "options": options, "directions": [FORWARD],
        "problem": problem, "only_compile": False, "sustained": False, "host": False,
        "sampling": {"repeats": 1, "warmup": 1, "pause": 0},
    }  # fmt: skip
    serve(job, rows.append)
    hidden = 128  # 8/3 of 32, rounded up to 64
    block = 32 * (16 + 16 + 3 * 32) + 2 * (32 * 2 + 2) + 32 + 2 * 32 + 3 * 32 * hidden
    states = 2 * 3 * 2 * (8 * 16 + 8 + 1)
    assert rows[0]["moved_bytes"] == 4 * (2 * block + 32 + 50 * 32 + 2 * states)
    run = gpu.Run(GpuBench("fakes"), fake_suite("works"), lambda text: None)
    run.rates = RATES
    row = run.finish(run.suite.entries[0], 1, {"direction": FORWARD, "seconds": 1.0, "moved_bytes": 2e12})
    assert (row["floor_seconds"], row["sustained_floor_seconds"], row["ratio"]) == (0.5, 2 / 3, 2.0)


@pytest.mark.parametrize("name", [name for name in SUITES if not name.startswith("smoke")])
def test_suites_are_the_papers_setups(name):
    suite = SUITES[name]
    keys = [e.key for e in suite.entries]
    assert len(set(keys)) == len(keys)
    if name.startswith("fig"):
        assert {"tfla mLSTMsig", "tfla mLSTMexp"} <= {e.name for e in suite.entries}
    for entry in suite.entries:
        module, _, maker = entry.make.partition(":")
        assert callable(getattr(__import__(module, fromlist=[maker]), maker))
        for x in suite.xs:
            problem = suite.problem(entry, x, "cuda")
            if name in ("fig4", "fig12", "fig13", "mamba"):
                assert problem.B * problem.T == 65_536
            others = ("delta", "fig13", "host", "transformers", "train", "mixers", "speculate")
            if entry.ours and not name.startswith(others):
                assert problem.H * problem.dhv == 4096


def test_rooflines_of_the_papers_setup():
    """16 heads, dqk 128, dhv 256 and 65,536 tokens move 1.6 GB forward and 2.7 GB more backward, by hand."""
    problem = SUITES["fig4"].at(8192)
    tokens = 65_536 * 16 * 2
    assert problem.B * forward_bytes(8192, 16, 128, 256) == tokens * (128 + 128 + 256 + 256)
    assert problem.B * backward_bytes(8192, 16, 128, 256) == tokens * (2 * 128 + 2 * 256 + 2 * 128 + 256)
    more = problem.B * (backward_bytes(8192, 16, 128, 256, normalizer=True) - backward_bytes(8192, 16, 128, 256))
    assert more == tokens * 256
    assert step_bytes(8, 256, 512) == 2 * 8 * 256 * 512 * 4
    rested = gpu.rooflines(problem, "sigmoid", FORWARD, RATES)["floor_seconds"]
    assert rested == pytest.approx(tokens * 768 / 4e12)


def test_what_failed_few_samples_and_absent_baselines_on_the_page():
    suite, config = SUITES["fig14"], vars(GpuBench("fig14"))
    sizes = {"direction": FORWARD, "x": 32}
    timed = {"seconds": 0.0123, "samples": 7, "floor_seconds": 0.01, "ratio": 1.23}
    result = {
        "title": suite.title, "axis": suite.axis, "config": config, "rates": RATES,
        "environment": {"device": "a GPU", "date": "today", "versions": {"tfla": "1"}},
        "rows": [
            sizes | timed | {"name": "tfla mLSTMsig", "implementation": "triton fused", "peak_bytes": 2**30},
            sizes | {"name": "tfla mLSTMsig, hopper fused", "error": "ValueError: cannot run these inputs"},
            sizes | {"name": "fla gla chunk", "error": "RuntimeError: a | b"},
            sizes | {"name": "fla simple_gla chunk", "error": gpu.NOT_RUN},
            {"name": "Mamba", "error": "not installed (selective_scan_cuda)"},
        ],
    }  # fmt: skip
    text = gpu_report.section(stored.merge({"fig14": result}), None)
    assert "| tfla mLSTMsig | 12.30\\* (1.23 ×) |" in text
    assert "| fla gla chunk | failed [1] |" in text
    assert "1. RuntimeError: a / b" in text
    assert "Not run, no time being left: fla simple_gla chunk." in text
    assert "| fla simple_gla chunk |" not in text
    assert "Not installed there: Mamba." in text
    assert "Not for these sizes: tfla mLSTMsig, hopper fused." in text
    assert "| tfla mLSTMsig | 1.00 |" in text
    assert "`tfla bench gpu fig14 --out benchmarks/results/fig14.json`" in text


def test_training_steps_and_implementations_on_the_page():
    rows = [
        {"x": x, "name": name, "direction": STEP, "seconds": 0.25, "samples": 7, "tokens_per_second": 98_304.0,
         "operator_share": 0.0625, "peak_bytes": 3 * 2**30, "implementation": kernel, "group": "dqk = dhv"}
        for name, x, kernel in (("tfla mLSTMsig", 64, "triton fused"), ("tfla mLSTMsig", 128, "hopper fused"),
                             ("tfla mLSTMexp", 64, "triton fused"), ("tfla mLSTMsig", 256, "hopper fused"))
    ]  # fmt: skip
    rows.append({"x": 512, "name": "tfla mLSTMexp", "direction": STEP, "error": "out of memory", "group": "dqk = dhv"})
    result = {
        "title": "t", "axis": "dhv", "note": "How it is done.", "rates": RATES, "rows": rows,
        "config": vars(GpuBench("train")), "environment": {"device": "a GPU", "date": "today", "versions": {}},
    }  # fmt: skip
    text = gpu_report.section(stored.merge({"train": result}), None)
    assert "### t\n\nHow it is done.\n\n" in text
    assert "| training step, ms, by dhv | 64 | 128 | 256 | 512 |" in text  # also what no GPU could run
    assert "| tfla mLSTMexp | 250.0\\* | - | - | failed [1] |" in text
    assert "| tokens per second, thousands, by dhv | 64 | 128 | 256 |\n" in text
    assert "| tfla mLSTMsig | 98.3 | 98.3 | 98.3 |\n| tfla mLSTMexp | 98.3 | - | - |" in text
    assert "| tfla mLSTMsig | 6.2 | 6.2 | 6.2 |" in text
    assert (
        "By default (dqk = dhv) tfla mLSTMsig is triton fused at 64 and hopper fused at 128, 256; "
        "tfla mLSTMexp is triton fused."
    ) in text


def run_of(only, date, *rows):
    return {
        "suite": "fig4", "title": "t", "axis": "T", "panels": [FORWARD], "rates": RATES,
        "environment": {"device": "a GPU", "date": date, "versions": {}},
        "config": vars(GpuBench("fig4", only=only, repeats=len(only) + 7)),
        "rows": [{"name": name, "x": 512, "direction": FORWARD} | row for name, row in rows],
    }  # fmt: skip


def test_runs_of_one_setup_are_one_result(tmp_path):
    old, new = ({"seconds": s, "samples": 7} for s in (1e-3, 2e-3))
    failed = {"error": "not run: the budget was spent"}
    runs = {
        "fig4": run_of((), "2026-01-02", ("tfla mLSTMsig", new), ("attention, cuDNN", failed)),
        "fig4_attention": run_of(("attention",), "2026-01-02", ("attention, cuDNN", old)),
        "fig4_old": run_of(("tfla",), "2026-01-01", ("tfla mLSTMsig", old)),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    (tmp_path / "other.json").write_text('{"rows": []}')
    loaded = stored.load(tmp_path)
    assert list(loaded) == ["fig4"]
    rows = loaded["fig4"]["rows"]
    assert [(r["name"], r["seconds"], r["asked"]) for r in rows] == [
        ("tfla mLSTMsig", 2e-3, 7), ("attention, cuDNN", 1e-3, 8),
    ]  # fmt: skip
    page = gpu_report.section(loaded["fig4"], None)
    assert page.count(f"### {SUITES['fig4'].title}\n") == 1  # as the setup is called now
    assert "| attention, cuDNN | 1.000\\* |" in page
    assert "\n\nattention: a GPU, 2026-01-02" in page  # a name of an implementation stays as it is
    assert "--only attention --repeats 8 --out benchmarks/results/fig4_attention.json" in page


def test_options_from_the_command_line(capsys):
    config = parse(["fig4", "--only", "fla", "Mamba", "--lengths", "512", "--no-baselines", "--budget", "60"], "bench")
    assert config == GpuBench("fig4", only=("fla", "Mamba"), lengths=(512,), baselines=False, budget=60.0)
    assert parse(["fig4", "--no-peers"], "bench") == GpuBench("fig4", baselines=False)  # the option's earlier name
    assert gpu_report.command(json.loads(json.dumps(vars(config), default=str)), "x") == (
        "tfla bench gpu fig4 --only fla Mamba --lengths 512 --no-baselines --budget 60.0 "
        "--out benchmarks/results/x.json"
    )
    assert gpu.main(["fig4", "--only", "nobody"]) == 2
    assert "this suite has tfla mLSTMsig; tfla mLSTMexp" in capsys.readouterr().err
