"""The parity table: loss and gradients of a distributed model are those of one process, for every layout."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import run_on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tfla.distributed import parallelize
from tfla.nn import LanguageModel, MLSTMStack, ModelConfig
from tfla.nn.pretrained import load_alone
from tfla.train.ranks import Ranks

LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "replicas": {"dp_replicate": 4, "dp_shard": 1},
    "tp": {"tp": 4},
    "fsdp-tp": {"dp_shard": 2, "tp": 2},
    "hsdp-tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "cp": {"cp": 4},
    "fsdp-cp": {"dp_shard": 2, "cp": 2},
    "hsdp-cp": {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
    "cp-tp": {"cp": 2, "tp": 2},
    # Of two processes, since each process traces what is compiled.
    "fsdp-of-two": {"dp_shard": 2},
    "tp-of-two": {"tp": 2},
}
BATCH, CONTEXT = 4, 24


class Case(NamedTuple):
    """A row of the table; the vocabulary of 33 tokens is divided by no number of processes."""

    layout: str
    dtype: torch.dtype
    mixer: str = "mlstm_exp"
    options: tuple[tuple[str, Any], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()


# Layers of every kind in one model.
MIXTURES: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("layers", ("gated_delta_net", "mamba2", "attention", "mlstm_exp")), ("num_blocks", 4), ("window", 7)),
    (("layers", ("kda", "gla", "attention", "delta_net", "retnet")), ("num_blocks", 5)),
)

CASES = [
    *(Case(layout, torch.float64) for layout in LAYOUTS if not layout.endswith("two")),
    *(Case(layout, torch.float32) for layout in ("hsdp", "replicas", "tp", "fsdp-tp", "cp-tp", "fsdp-cp")),
    Case("fsdp-tp", torch.float64, "mlstm_sig"),
    Case("hsdp-tp", torch.float64, "attention"),
    Case("cp", torch.float64, "attention"),
    Case("fsdp-cp", torch.float64, "attention", fields=(("num_kv_heads", 2), ("attention_sinks", True), ("window", 5))),
    Case("cp-tp", torch.float64, "attention", (("activation_checkpointing", True),)),
    Case("cp", torch.float64, "retnet"),
    Case("fsdp-cp", torch.float64, "mamba2"),
    Case("cp-tp", torch.float64, "retnet", (("activation_checkpointing", True),)),
    Case("cp", torch.float64, "gla"),
    Case("cp", torch.float64, "delta_net", (("activation_checkpointing", True),)),
    Case("cp-tp", torch.float64, "gated_delta_net"),
    Case("fsdp-cp", torch.float64, "kda"),
    Case("fsdp", torch.float64, "mamba2"),
    Case("tp", torch.float64, "mamba2"),
    Case("fsdp-tp", torch.float64, "mamba2", (("activation_checkpointing", True),)),
    Case("cp-tp", torch.float64, "mamba2"),
    Case("hsdp-tp", torch.float64, "gla"),
    Case("tp", torch.float64, "delta_net"),
    Case("fsdp-tp", torch.float64, "gated_delta_net"),
    Case("fsdp-tp", torch.float64, "kda", (("activation_checkpointing", True),)),
    Case("fsdp-tp", torch.float64, "attention", fields=(("num_kv_heads", 2), ("attention_sinks", True), ("window", 5))),
    Case("fsdp", torch.float64, "mlstm_exp", (("activation_checkpointing", True),)),
    Case("fsdp-tp", torch.float64, "mlstm_exp", (("activation_checkpointing", True),)),
    Case("cp-tp", torch.float64, "mlstm_sig"),
    Case("cp-tp", torch.float64, "mlstm_sig", (("activation_checkpointing", True),)),
    Case("fsdp", torch.float32, "mlstm_exp", (("reshard_after_forward", False),)),
    Case("fsdp", torch.float64, "mlstm_exp", (("blocks_per_gather", 2), ("prefetch", 1))),
    Case("fsdp-cp", torch.float64, fields=(("num_blocks", 5),), options=(("blocks_per_gather", 2), ("prefetch", 2))),
    Case("hsdp-tp", torch.float64, options=(("prefetch", 1), ("reshard_after_forward", False))),
    Case(
        "fsdp-of-two",
        torch.float64,
        fields=(("num_blocks", 3),),
        options=(("blocks_per_gather", 2), ("activation_checkpointing", True), ("compile", "aot_eager")),
    ),
    Case("fsdp", torch.float64, fields=MIXTURES[0]),
    Case("tp", torch.float64, fields=MIXTURES[1]),
    Case("hsdp-tp", torch.float64, fields=MIXTURES[0]),
    Case("cp", torch.float64, fields=MIXTURES[0]),
    Case("fsdp-cp", torch.float64, fields=MIXTURES[1]),
    Case("cp-tp", torch.float64, options=(("activation_checkpointing", True),), fields=MIXTURES[0]),
    Case(
        "tp-of-two",
        torch.float64,
        options=(("compile", "aot_eager"),),
        fields=(("layers", ("gated_delta_net", "mamba2", "retnet")), ("num_blocks", 3)),
    ),
    Case("cp-tp", torch.float64, "kda", options=(("compile", "aot_eager"),), fields=(("num_blocks", 1),)),
    Case(
        "cp-tp",
        torch.float64,
        options=(("activation_checkpointing", True), ("compile", "aot_eager")),
        fields=(("layers", ("mlstm_exp", "attention")),),
    ),
    Case(
        "hsdp-tp",
        torch.float64,
        options=(("activation_checkpointing", True), ("compile", "aot_eager")),
        fields=(("layers", ("attention",)), ("num_blocks", 1), ("window", 7), ("attention_sinks", True)),
    ),
]


def cases_of(count: int) -> list[Case]:
    """Return the cases of as many processes."""
    return [case for case in CASES if math.prod(LAYOUTS[case.layout].values()) == count]


def make_model(dtype: torch.dtype, mixer: str = "mlstm_exp", **fields: Any) -> LanguageModel:
    """Return a model of random weights, the same on every process."""
    given: dict[str, Any] = {
        "d_model": 32, "num_blocks": 2, "num_heads": 4, "vocab_size": 33, "mixer": mixer, "ffn_multiple": 8,
        "input_gate_bias": -1.0, "mamba_head_dim": 16, "mamba_state_dim": 8,
    }  # fmt: skip
    config = ModelConfig.from_dict(given | fields)
    torch.manual_seed(0)
    model = LanguageModel(config).to(dtype)
    with torch.no_grad():  # gates start with weights of 0, which would hide a gradient that is not reduced
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_windows() -> Tensor:
    """Return tokens (B, T + 1); token 0 starts a document."""
    return torch.randint(33, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


def mean_loss(model: nn.Module, windows: Tensor, steps: slice = slice(None)) -> Tensor:
    """Return the mean loss of the windows' tokens at the given steps."""
    ids, targets = windows[:, :-1][:, steps], windows[:, 1:][:, steps]
    return F.cross_entropy(model(ids, document_start=ids == 0).flatten(0, 1), targets.flatten())


def whole(x: Tensor) -> Tensor:
    """Return a tensor without its distribution."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shares(sizes: dict[str, int], coordinate: dict[str, int]) -> tuple[slice, slice]:
    """Return the rows and the steps of a batch that a process computes."""
    data = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    row = coordinate.get("dp_replicate", 0) * sizes.get("dp_shard", 1) + coordinate.get("dp_shard", 0)
    rows, steps = BATCH // data, CONTEXT // sizes.get("cp", 1)
    step = coordinate.get("cp", 0)
    return slice(row * rows, (row + 1) * rows), slice(step * steps, (step + 1) * steps)


class Errors(NamedTuple):
    """Relative errors of the loss and of every gradient, against one process in float64."""

    one_process: dict[str, float]
    """Those of one process in the dtype of the case."""
    distributed: dict[str, float]


@functools.cache
def one_process(
    dtype: torch.dtype, mixer: str, fields: tuple[tuple[str, Any], ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of one process, computed once for all layouts."""
    model = make_model(torch.float64, mixer, **dict(fields)).to(dtype)
    loss = mean_loss(model, make_windows())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def relative_errors(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> dict[str, float]:
    """Return the relative errors of a loss and gradients."""
    assert found[1].keys() == expected[1].keys()
    gradients = {name: float((found[1][name] - g).norm() / g.norm()) for name, g in expected[1].items()}
    return {"loss": abs(float(found[0] / expected[0]) - 1), **gradients}


def compute_errors(cases: list[Case]) -> list[Errors]:
    """Return the errors of each case on the first process, an empty list on the others; runs on each process."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = []
    for case in cases:
        torch._dynamo.reset()  # graphs of another mesh
        windows = make_windows()
        sizes = LAYOUTS[case.layout]
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = parallelize(
            make_model(torch.float64, case.mixer, **dict(case.fields)).to(case.dtype), mesh, **dict(case.options)
        )
        rows, steps = shares(sizes, dict(zip(sizes, mesh.get_coordinate(), strict=True)))
        loss = mean_loss(model, windows[rows], steps)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        norm = Ranks(size=dist.get_world_size()).clip_gradients(model.parameters(), torch.inf).item()
        every = torch.stack([g.norm() for g in gradients.values()]).norm()
        assert abs(norm / float(every) - 1) < 1e-5
        if dist.get_rank() == 0:
            expected, alone = (one_process(of, case.mixer, case.fields) for of in (torch.float64, case.dtype))
            distributed = relative_errors((mean / dist.get_world_size(), gradients), expected)
            found.append(Errors(relative_errors(alone, expected), distributed))
    return found


def _compute_all(folder: Path) -> tuple[list[Errors], dict[str, str]]:
    """Return the errors of all cases and the messages of all wrong calls, and save a model; runs on each process."""
    found = compute_errors(cases_of(4)), _bad_layouts()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize(make_model(torch.float32), mesh)
    model.save_pretrained(folder)
    ids = make_windows()[:, :-1]
    with torch.no_grad():
        model.losses(ids, ids)
    assert all(isinstance(p, DTensor) for p in model.parameters())  # else zero_grad would clear no gradient
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the saved model."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def computed(folder: Path) -> tuple[list[Errors], dict[str, str]]:
    """Return what the same four processes have computed for all tests."""
    return run_on_processes(4, _compute_all, folder)


def test_a_distributed_model_is_saved_whole(computed: object, folder: Path) -> None:
    saved, expected = LanguageModel.from_pretrained(folder).state_dict(), make_model(torch.float32).state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], x) for name, x in expected.items())


def _rows_of_a_vocabulary(folder: Path) -> dict[str, bool]:
    """Return whether gathered and loaded weights are those of the model; runs on six processes."""
    fields = {"d_model": 24, "vocab_size": 31}
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize(make_model(torch.float32, **fields), mesh)
    expected = make_model(torch.float32, **fields).state_dict()
    gathered = {name: torch.equal(whole(p), expected[name]) for name, p in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    loaded = {name: torch.zeros_like(x) for name, x in expected.items()}
    load_alone({"model": loaded}, folder)
    return {name: found and torch.equal(loaded[name], expected[name]) for name, found in gathered.items()}


def test_a_vocabulary_that_is_divided_twice_is_gathered_and_saved(tmp_path: Path) -> None:
    """31 rows are 16 and 15 by tensor parallelism, and FSDP2 divides each of these by three once more."""
    found = run_on_processes(6, _rows_of_a_vocabulary, tmp_path)
    assert len(found) > 20
    assert all(found.values()), [name for name, right in found.items() if not right]


@pytest.fixture(scope="module")
def errors(computed: tuple[list[Errors], dict[str, str]]) -> dict[Case, Errors]:
    """Return the errors of every case."""
    of_two = run_on_processes(2, compute_errors, cases_of(2))
    return dict(zip(cases_of(4) + cases_of(2), computed[0] + of_two, strict=True))


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.layout}-{str(c.dtype)[6:]}-{c.mixer}-{dict(c.options + c.fields)}"
)
def test_loss_and_gradients_are_those_of_one_process(case: Case, errors: dict[Case, Errors]) -> None:
    found = errors[case]
    floor = 1e-12 if case.dtype == torch.float64 else 1e-5
    # The gradients of the input gates' biases nearly cancel, in one process too.
    wrong = {name: e for name, e in found.distributed.items() if not e < floor + 4 * found.one_process[name]}
    assert len(found.distributed) > 10 * dict(case.fields).get("num_blocks", 2)
    assert wrong == {}


def _bad_layouts() -> dict[str, str]:
    """Return the error of each wrong call; runs on four processes."""
    model = make_model(torch.float32)
    own = make_model(torch.float32, "gla")
    for block in own.blocks:
        del block.mixer.context_parallel  # as a mixer of one's own that does not take it
        block.mixer.tensor_parallel = {}

    def mesh(names: tuple[str, ...] | None, *shape: int) -> Any:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    odd = LanguageModel(ModelConfig(d_model=24, num_blocks=1, num_heads=2, vocab_size=8, ffn_multiple=8))
    small = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=4, vocab_size=8, ffn_multiple=1))
    taken = parallelize(make_model(torch.float32), mesh(("dp_shard",), 4))
    tied = make_model(torch.float32)
    tied.unembedding.weight = tied.embedding.weight
    calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "no mesh": (model, "tp", {}),
        "no names": (model, mesh(None, 4), {}),
        "unknown name": (model, mesh(("data",), 4), {}),
        "order": (model, mesh(("tp", "dp_shard"), 2, 2), {}),
        "replicate alone": (model, mesh(("dp_replicate",), 4), {}),
        "no model": (3, mesh(("tp",), 4), {}),
        "twice": (taken, mesh(("dp_shard",), 4), {}),
        "heads": (odd, mesh(("tp",), 4), {}),
        "feed-forward": (small, mesh(("tp",), 4), {}),
        "no mixer": (nn.Linear(4, 4), mesh(("tp",), 4), {}),
        "cp of no mixer": (nn.Linear(4, 4), mesh(("cp",), 4), {}),
        "cp of its own": (own, mesh(("cp",), 4), {}),
        "tp of its own": (own, mesh(("tp",), 4), {}),
        "tp of tied weights": (tied, mesh(("tp",), 4), {}),
        "cp of a stack": (nn.Sequential(MLSTMStack(4, 4), model), mesh(("cp",), 4), {}),
        "policy": (model, mesh(("dp_shard",), 4), {"mixed_precision": torch.bfloat16}),
        "policy alone": (model, mesh(("tp",), 4), {"mixed_precision": MixedPrecisionPolicy()}),
        "gathers alone": (model, mesh(("tp",), 4), {"blocks_per_gather": 2}),
        "prefetch alone": (model, mesh(("tp",), 4), {"prefetch": 1}),
        "kept alone": (model, mesh(("dp_shard", "tp"), 1, 4), {"reshard_after_forward": False}),
        "freed alone": (model, mesh(("tp",), 4), {"reshard_after_forward": True}),
        "unknown order": (model, mesh(("cp",), 4), {"cp_order": "ring"}),
        "order alone": (model, mesh(("dp_shard",), 4), {"cp_order": "zigzag"}),
        "blocks": (model, mesh(("dp_shard",), 4), {"blocks": [nn.Linear(2, 2)]}),
        "no blocks": (model, mesh(("dp_shard",), 4), {"blocks_per_gather": 0}),
        "no prefetch": (model, mesh(("dp_shard",), 4), {"prefetch": 1.5}),
        "plan": (model, mesh(("tp",), 4), {"tp_plan": {"blocks.9": None}}),
    }

    def error_of(module: Any, at: Any, options: dict[str, Any]) -> str:
        with pytest.raises((TypeError, ValueError)) as raised:
            parallelize(module, at, **options)
        return f"{raised.type.__name__} {raised.value}"

    found = {name: error_of(*call) for name, call in calls.items()}
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return found


NAMES = "dp_replicate, dp_shard, cp, tp"
EXPECTED = {
    "no mesh": "TypeError mesh: got str, expected a torch.distributed.DeviceMesh",
    "no names": f"ValueError mesh: got dimensions without names, expected mesh_dim_names among {NAMES}",
    "unknown name": f"ValueError mesh: got the dimensions data, expected some of {NAMES}, in this order",
    "order": f"ValueError mesh: got the dimensions tp, dp_shard, expected some of {NAMES}, in this order",
    "replicate alone": "ValueError mesh: got dp_replicate without dp_shard, expected both; dp_shard may have size 1",
    "no model": "TypeError model: got int, expected a torch.nn.Module",
    "twice": "ValueError model: got one whose parameters are distributed already, expected plain tensors",
    "heads": "ValueError mesh: got tp of size 4, expected a divisor of the 2 heads",
    "feed-forward": "ValueError mesh: got tp of size 4, expected a divisor of the SwiGLU's width, 43",
    "no mixer": "ValueError mesh: got tp of size 4, expected 1 for Linear, which has no mixer of tfla.nn",
    "cp of no mixer": "ValueError mesh: got cp of size 4, expected 1 for Linear, which never calls tfla.mlstm",
    "cp of its own": "ValueError mesh: got cp of size 4, expected 1 for GatedLinearAttention, which has no exchange of "
    "states between processes",
    "tp of its own": "ValueError mesh: got tp of size 4, expected 1 for GatedLinearAttention, whose "
    "tensor_parallel does not say how processes share its modules",
    "tp of tied weights": "ValueError mesh: got tp of size 4, expected 1 for a model whose unembedding.weight is its "
    "embedding.weight",
    "cp of a stack": "ValueError mesh: got cp of size 4, expected 1 for MLSTMStack, which has no exchange of states "
    "between processes",
    "policy": "TypeError mixed_precision: got dtype, expected a torch.distributed.fsdp.MixedPrecisionPolicy",
    "policy alone": "ValueError mixed_precision: got a policy, expected None for a mesh without data parallelism",
    "gathers alone": "ValueError blocks_per_gather: got 2, expected 1 for a mesh without data parallelism",
    "prefetch alone": "ValueError prefetch: got 1, expected None for a mesh without data parallelism",
    "kept alone": "ValueError reshard_after_forward: got False, expected None for a mesh without data parallelism",
    "freed alone": "ValueError reshard_after_forward: got True, expected None for a mesh without data parallelism",
    "unknown order": "ValueError cp_order: got 'ring', allowed are 'contiguous', 'zigzag'",
    "order alone": "ValueError cp_order: got 'zigzag', expected 'contiguous' for a mesh without context parallelism",
    "blocks": "ValueError blocks[0]: got Linear, expected a module within the model",
    "no blocks": "ValueError blocks_per_gather: got 0, expected at least 1",
    "no prefetch": "TypeError prefetch: got float, expected an int",
    "plan": "ValueError tp_plan: got blocks.9, expected names of modules of the model",
}


def test_bad_layouts_are_named(computed: tuple[list[Errors], dict[str, str]]) -> None:
    assert computed[1] == EXPECTED
