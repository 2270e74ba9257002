"""Training on several processes: the same curve in every layout, and runs that continue in any other one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import STEPS, Job, copy_run, curve, make_config, run_jobs, weights, write_texts

import tfla.distributed
from tfla._util.errors import UserError
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.checkpoint import latest_checkpoint
from tfla.train.config import GenerateConfig, Model, Optim, Parallel
from tfla.train.layout import check_layout, distribute
from tfla.train.loop import train
from tfla.train.ranks import Ranks
from tfla.train.sample import sample

PROCESSES = 4
ONCE = Parallel(reshard_after_forward=False, blocks_per_gather=2, prefetch=1, reduce_each_pass=False)
MIXED = Model(
    d_model=32, num_blocks=4, num_heads=2, mamba_head_dim=16, mamba_state_dim=8,
    layers=("gated_delta_net", "attention", "mamba2", "kda"),
)  # fmt: skip
UNBROKEN: dict[str, Any] = {"eval_every": 100, "checkpoint_every": 100}
HSDP, TP, CP, CP_TP = Parallel(dp_replicate=2), Parallel(tp=2), Parallel(cp=4), Parallel(cp=2, tp=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run of one process, "one", and with those of four processes."""
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder)
    one = make_config(folder, "one", threads=1)
    train(one)
    fsdp = make_config(folder, "fsdp", threads=1, parallel=Parallel(dp_shard=PROCESSES))
    mixed = replace(make_config(folder, "mixed-one", threads=1), model=MIXED)
    train(mixed)
    four = [
        Job(fsdp),
        Job(replace(fsdp, run=folder / "hsdp", parallel=HSDP, accumulate=2, activation_checkpointing=True)),
        Job(replace(fsdp, run=folder / "tp", parallel=TP)),
        Job(replace(fsdp, run=folder / "cp", parallel=CP)),
        Job(replace(fsdp, run=folder / "packed", parallel=Parallel(cp=2), reset="cu_seqlens")),
        Job(replace(fsdp, run=folder / "fsdp-cp-tp", parallel=CP_TP), copy=(folder / "fsdp", 2)),
        Job(replace(fsdp, run=folder / "fsdp-fsdp"), copy=(folder / "fsdp", 2)),
        Job(replace(fsdp, run=folder / "fsdp-tp", parallel=TP), copy=(folder / "fsdp", 2)),
        Job(replace(fsdp, run=folder / "tp-tp", parallel=TP), copy=(folder / "tp", 2)),
        Job(replace(fsdp, run=folder / "one-tp", parallel=TP), copy=(folder / "one", 2)),
        Job(replace(fsdp, run=folder / "once", accumulate=2, parallel=ONCE)),
        Job(replace(fsdp, run=folder / "once-each", accumulate=2), copy=(folder / "once", 2)),
        Job(replace(fsdp, run=folder / "reduced", parallel=Parallel(reduce_dtype="bfloat16"))),
        Job(replace(fsdp, run=folder / "gathered", precision="bfloat16", parallel=Parallel(gather_dtype="bfloat16"))),
        Job(replace(mixed, run=folder / "mixed-cp-tp", parallel=CP_TP)),
        Job(replace(mixed, run=folder / "mixed-zigzag", parallel=Parallel(cp=2, cp_order="zigzag"))),
        Job(replace(mixed, run=folder / "mixed-fsdp-tp", parallel=TP), copy=(folder / "mixed-cp-tp", 2)),
        Job(replace(fsdp, run=folder / "stopped", **UNBROKEN), signal_after=1),
        Job(replace(fsdp, run=folder / "stopped", **UNBROKEN)),
        Job(replace(fsdp, run=folder / "full-disk"), copy=(folder / "fsdp", 2), full_disk=True),
    ]
    run_jobs(PROCESSES, four, folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        "hsdp",
        "tp",
        "cp",
        "packed",
        "fsdp-cp-tp",
        "fsdp-fsdp",
        "fsdp-tp",
        "tp-tp",
        "one-tp",
        "once",
        "once-each",
    ],
)
def test_every_layout_has_the_curve_of_one_process(runs: Path, name: str) -> None:
    expected, found = curve(runs / "one"), curve(runs / name)
    assert list(found) == list(expected)
    assert len(found) == STEPS + 3
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key


@pytest.mark.parametrize("name", ["mixed-cp-tp", "mixed-zigzag", "mixed-fsdp-tp"])
def test_layers_of_several_kinds_have_the_curve_of_one_process(runs: Path, name: str) -> None:
    expected, found = curve(runs / "mixed-one"), curve(runs / name)
    assert list(found) == list(expected)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key


@pytest.mark.parametrize(("name", "tolerance"), [("reduced", 2e-3), ("gathered", 2e-2)])
def test_weights_are_gathered_and_gradients_reduced_in_bfloat16(runs: Path, name: str, tolerance: float) -> None:
    expected, found = curve(runs / "one"), curve(runs / name)
    apart = [abs(found[key][0] / values[0] - 1) for key, values in expected.items()]
    assert 1e-6 < max(apart) < tolerance


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_a_run_continues_bit_for_bit_in_the_same_layout(runs: Path, name: str) -> None:
    assert curve(runs / f"{name}-{name}") == curve(runs / name)
    again, whole = weights(runs / f"{name}-{name}"), weights(runs / name)
    assert all(torch.equal(again[key], whole[key]) for key in whole)
    assert len(whole) > 20


def test_a_signal_of_one_process_stops_all_after_the_same_step(runs: Path) -> None:
    """Process 1 catches it while step 2 is computed; all know of it once step 3 is enqueued, which they finish."""
    assert [(runs / f"stopped-{rank}").read_text() for rank in range(PROCESSES)] == ["3 2"] * PROCESSES
    found, whole = curve(runs / "stopped"), curve(runs / "fsdp")
    assert found == {key: whole[key] for key in whole if key != ("eval", 3)}
    again, expected = weights(runs / "stopped"), weights(runs / "fsdp")
    assert all(torch.equal(again[key], expected[key]) for key in expected)
    assert [path.name for path in sorted((runs / "stopped" / "checkpoints").glob("step-*"))] == [
        "step-00000003",
        f"step-{STEPS:08d}",
    ]


def test_one_process_continues_a_run_of_four(runs: Path) -> None:
    copy_run(runs / "tp", runs / "tp-one", 2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        train(make_config(runs, "tp-one", threads=1))
    assert not [str(w.message) for w in shown if "torch.distributed" in str(w.message)]
    for key, values in curve(runs / "one").items():
        assert curve(runs / "tp-one")[key] == pytest.approx(values, rel=1e-4), key
    assert (runs / "tp-one" / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors").is_file()


def test_the_command_continues_a_run_on_as_many_processes_as_there_are(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_run(runs / "fsdp", runs / "fsdp-command", 2)
    assert main(["train", "--run", str(runs / "fsdp-command")]) == 0
    assert "parallel.dp_shard: None from here on, 4 before" in capsys.readouterr().err
    for key, values in curve(runs / "one").items():
        assert curve(runs / "fsdp-command")[key] == pytest.approx(values, rel=1e-4), key


def test_the_command_names_the_sizes_of_a_run_that_do_not_fit(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", "--run", str(copy_run(runs / "fsdp-cp-tp", runs / "fsdp-cp-tp-command", 2))]
    assert main(run) == 1
    error = capsys.readouterr().err
    assert "torchrun --nproc-per-node 4 -m tfla train; the run so far had cp 2 and tp 2, to continue without: " in error
    assert error.endswith("without: --parallel.cp 1 --parallel.tp 1\n")
    assert main([*run, "--parallel.cp", "1", "--parallel.tp=1"]) == 0


ALL_OPTIONS = Parallel(
    dp_shard=4, gather_dtype="bfloat16", reduce_dtype="bfloat16", reshard_after_forward=False, blocks_per_gather=2,
    prefetch=1, reduce_each_pass=False,
)  # fmt: skip
UNSHARDED = Parallel(reshard_after_forward=True, blocks_per_gather=1)


@pytest.mark.parametrize(
    ("layout", "processes", "given", "expected"),
    [
        (Parallel(dp_shard=4), 4, set(), Parallel(dp_shard=4)),
        (Parallel(dp_shard=4), 3, set(), Parallel()),
        (Parallel(dp_shard=4, cp=2), 4, {"cp"}, Parallel(cp=2)),
        (Parallel(dp_replicate=2, dp_shard=4), 2, set(), Parallel(dp_replicate=2)),
        (Parallel(dp_shard=4), 3, {"dp_shard"}, "parallel: got dp_shard 4, expected a product of 3, the number of pr"),
        (Parallel(tp=2), 3, {"tp"}, "parallel: got tp 2, expected a divisor of 3, the number of processes$"),
        (Parallel(dp_shard=2, dp_replicate=2), 3, set(), "got dp_replicate 2, expected .*: --parallel.dp-replicate 1$"),
        (Parallel(dp_shard=2, cp=2), 2, {"dp_shard"}, "got dp_shard 2 x cp 2, expected a product .*: --parallel.cp 1$"),
        (Parallel(cp=2, cp_order="zigzag"), 1, {"cp"}, "parallel: got cp 2"),
        (Parallel(cp_order="zigzag"), 1, {"cp"}, Parallel()),
        (Parallel(cp_order="zigzag"), 1, {"cp", "cp_order"}, Parallel(cp_order="zigzag")),
        (Parallel(cp=2, cp_order="zigzag"), 4, set(), Parallel(cp=2, cp_order="zigzag")),
        (ALL_OPTIONS, 1, set(), Parallel()),
        (ALL_OPTIONS, 1, {"prefetch"}, Parallel(prefetch=1)),
        (ALL_OPTIONS, 2, set(), replace(ALL_OPTIONS, dp_shard=None)),
        (replace(ALL_OPTIONS, dp_shard=None, tp=2), 2, set(), Parallel(tp=2)),
        (UNSHARDED, 1, set(), UNSHARDED),
    ],
)
def test_layouts_of_runs_that_continue(
    layout: Parallel, processes: int, given: set[str], expected: Parallel | str
) -> None:
    if isinstance(expected, Parallel):
        assert layout.resumed(processes, given) == expected
    else:
        with pytest.raises(UserError, match=expected):
            layout.resumed(processes, given)


def test_a_checkpoint_of_four_processes_is_read_on_one_device(runs: Path, tmp_path: Path) -> None:
    checkpoint = latest_checkpoint(runs / "tp" / "checkpoints")
    assert checkpoint is not None
    assert sorted(path.suffix for path in checkpoint.glob("__*")) == [".distcp"] * PROCESSES
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # users have asked for one device, and need not hear of it
        model = LanguageModel.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path)
    same = LanguageModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(x, same[name]) for name, x in model.state_dict().items())
    single = weights(runs / "one")
    assert {name: tuple(x.shape) for name, x in same.items()} == {name: tuple(x.shape) for name, x in single.items()}
    options = GenerateConfig(runs / "tp", tokenizer="bytes", prompt="state", seed=0, max_new_tokens=5)
    assert list(sample(options)) == list(sample(replace(options, checkpoint=tmp_path)))
    tuned = make_config(runs, "tuned", steps=1, init_from=runs / "tp", model=Model(), optim=Optim(lr=1e-9))
    assert train(tuned).step == 1
    assert curve(runs / "tuned")["eval", 0] == pytest.approx(curve(runs / "tp")["eval", STEPS], rel=1e-5)


def test_a_full_disk_of_one_process_ends_all_of_them(runs: Path) -> None:
    messages = [(runs / f"error-{rank}").read_text() for rank in range(PROCESSES)]
    target = runs / "full-disk" / "checkpoints"
    assert all("the checkpoint cannot be written: File too large" in message for message in messages), messages
    assert all(f"the last good checkpoint is {target / 'step-00000002'}" in message for message in messages)
    assert [path.name for path in target.glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("parallel", "processes", "message"),
    [
        (
            Parallel(dp_shard=4),
            1,
            "parallel: got dp_shard 4, expected that many processes: torchrun --nproc-per-node 4",
        ),
        (Parallel(dp_shard=4, cp=2), 4, "parallel: got dp_shard 4 x cp 2, expected a product of 4, the number of proc"),
        (Parallel(tp=3), 4, "parallel: got tp 3, expected a divisor of 4, the number of processes"),
        (Parallel(cp=0), 4, "parallel.cp: got 0, expected at least 1"),
        (Parallel(dp_shard=-1), 4, "parallel.dp_shard: got -1, expected at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(parallel: Parallel, processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parallel.sizes(processes)


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"dp_shard": 4}, {"batch_size": 6}, "batch_size: got 6 with accumulate 1, expected a multiple of 4"),
        ({"dp_replicate": 2, "dp_shard": 2}, {"accumulate": 4}, "batch_size: got 8 with accumulate 4, expected a mul"),
        ({"cp": 4}, {"context": 26}, "context: got 26, expected a multiple of parallel.cp, 4"),
        (
            {"tp": 2},
            {"parallel": Parallel(reduce_dtype="bfloat16")},
            "parallel.reduce_dtype: got bfloat16, expected flo",
        ),
        (
            {"tp": 2},
            {"parallel": Parallel(reshard_after_forward=False)},
            "parallel.reshard_after_forward: got False, expected None where no processes share",
        ),
        (
            {"tp": 2},
            {"parallel": Parallel(blocks_per_gather=2)},
            "parallel.blocks_per_gather: got 2, expected None where",
        ),
        (
            {"tp": 2},
            {"parallel": Parallel(reduce_each_pass=False), "accumulate": 2},
            "parallel.reduce_each_pass: got False, expected True where no processes share",
        ),
        (
            {"dp_shard": 2},
            {"parallel": Parallel(cp_order="zigzag")},
            "parallel.cp_order: got zigzag, expected contiguous with parallel.cp 1",
        ),
        ({"tp": 2}, {"parallel": Parallel(prefetch=1)}, "parallel.prefetch: got 1, expected None where no processes"),
        ({"tp": 4}, {}, "parallel: mesh: got tp of size 4, expected a divisor of the 2 heads"),
        (
            {"dp_shard": 3, "tp": 2},
            {"batch_size": 6},
            "dp_shard x cp of size 3 with tp of size 2, expected a divisor of the width, 32, where tp does not divide "
            "the vocabulary, 257",
        ),
    ],
)
def test_runs_that_cannot_be_divided_are_named(
    tmp_path: Path, sizes: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    model = ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=257)
    with pytest.raises(UserError, match=message):
        check_layout(make_config(tmp_path, "run", **changes), model, Ranks(size=4, sizes=sizes))


@pytest.mark.parametrize(
    ("sizes", "given", "expected"),
    [({"tp": 2}, None, None), ({"dp_shard": 2, "tp": 2}, None, True), ({"cp": 2}, False, False)],
)
def test_weights_are_freed_where_they_are_sharded(
    tmp_path: Path, sizes: dict[str, int], given: bool | None, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parallelize` refuses any choice on a mesh that shards no weights. On CPUs they are freed by default."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(tfla.distributed, "parallelize", lambda model, mesh, **options: calls.append(options))
    model = LanguageModel(ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=257))
    config = make_config(tmp_path, "run", parallel=Parallel(reshard_after_forward=given))
    mesh: Any = "mesh"
    ranks = Ranks(size=2, sizes=sizes, mesh=mesh)
    monkeypatch.setattr(ranks, "gather", lambda values: [values, values])
    distribute(model, config, ranks)
    assert [call.get("reshard_after_forward") for call in calls] == [expected]
    assert [call.get("blocks_per_gather", 1) for call in calls] == [1]


def test_options_of_earlier_runs_are_taken(tmp_path: Path) -> None:
    """Their defaults were values that do what None does where no weights are sharded."""
    model = ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=257)
    saved = Parallel(reshard_after_forward=True, blocks_per_gather=1)
    check_layout(make_config(tmp_path, "run", parallel=saved), model, Ranks())


def test_every_kind_of_layer_is_checked(tmp_path: Path) -> None:
    layers = ("gated_delta_net", "attention")
    model = ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=257, layers=layers, num_kv_heads=1)
    message = "parallel: mesh: got tp of size 2, expected a divisor of the 1 heads"
    with pytest.raises(UserError, match=message):
        check_layout(make_config(tmp_path, "run"), model, Ranks(size=2, sizes={"tp": 2}))
