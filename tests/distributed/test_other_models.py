"""Other models on several processes: of transformers, the example with a model of one's own, and an MLSTMStack."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import free_ports, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tfla.distributed import parallelize
from tfla.nn import LanguageModel, MLSTMStack, ModelConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallelize_own_model.py"
LAYOUTS = (("--dp-shard", "2"), ("--cp", "2"), ("--tp", "2"))
STEPS = ("--steps", "4", "--device", "cpu")


class Found(NamedTuple):
    """Relative errors of the loss and of all gradients of an xLSTM, and the losses of the example, by layout.

    ``stack`` is the largest error of a model with an MLSTMStack and of its gradients with tensor parallelism.
    ``positions`` are the errors of a TflaForCausalLM whose document starts at a token, and ``padding`` is its error.
    """

    xlstm: dict[str, tuple[float, float]]
    example: dict[str, list[float]]
    stack: float
    positions: dict[int, float]
    padding: str


def run_example(*args: str) -> list[float]:
    """Return the losses of the example."""
    spec = importlib.util.spec_from_file_location("parallelize_own_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([*args, *STEPS])


def xlstm_loss(model: Any, windows: Tensor) -> Tensor:
    """Return the mean loss of windows (B, T + 1)."""
    logits = model(windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def xlstm_errors() -> dict[str, tuple[float, float]]:
    """Return the errors of an accelerated xLSTM on two processes, by layout."""
    from plain_transformers import build

    from tfla.integrations.transformers import accelerate

    windows = torch.randint(2, 61, (2, 25), generator=torch.Generator().manual_seed(0))
    single = accelerate(build(torch.float64)).train()
    expected = xlstm_loss(single, windows)
    expected.backward()
    errors = {}
    for name in ("dp_shard", "cp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        model = parallelize(accelerate(build(torch.float64)).train(), mesh)
        rank = dist.get_rank()
        part = windows[rank : rank + 1] if name == "dp_shard" else windows[:, 12 * rank : 12 * rank + 13]
        loss = xlstm_loss(model, part)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        pairs = list(zip(model.parameters(), single.parameters(), strict=True))
        assert all(isinstance(p, DTensor) for p, _ in pairs)
        off = [(p.grad.full_tensor() - q.grad).norm() / q.grad.norm().clamp(min=1e-9) for p, q in pairs]
        errors[name] = abs(mean.item() / 2 / expected.item() - 1), float(max(off))
    return errors


class WithStack(nn.Module):
    """A language model with an MLSTMStack before the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.language_model = LanguageModel(ModelConfig(d_model=32, num_blocks=1, num_heads=2, vocab_size=16))
        self.stack = MLSTMStack(32, 32, num_heads=2, batch_first=True)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.language_model.logits(self.stack(self.language_model.hidden(ids)[0])[0])


def stack_error() -> float:
    """Return the largest relative error of a model with an MLSTMStack on two processes that share heads."""
    ids = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    single, model = WithStack(), parallelize(WithStack(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    expected, logits = single(ids), model(ids)
    expected.square().mean().backward()
    logits.square().mean().backward()
    pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), single.parameters(), strict=True)]
    return float(max((a - b).norm() / b.norm().clamp(min=1e-9) for a, b in [(logits, expected), *pairs]))


def tfla_errors() -> tuple[dict[int, float], str]:
    """Return the errors of a TflaForCausalLM on two processes that share steps: by document, and that of padding."""
    from small_tfla import make

    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), torch.arange(2, 14)[None]
    single, model = (make(("gated_delta_net", "attention")).eval() for _ in range(2))
    parallelize(model, mesh)
    own, errors = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6), {}
    for first in (6, 9):  # the first token of the second process, and one within its part
        position = torch.cat([torch.arange(first), torch.arange(12 - first)])[None]
        expected = single(ids, position_ids=position).logits[:, own]
        off = (model(ids[:, own], position_ids=position[:, own]).logits - expected).abs().max()
        dist.all_reduce(off, dist.ReduceOp.MAX)
        errors[first] = off.item()
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    with pytest.raises(ValueError, match="padding") as raised:
        model(ids[:, own], attention_mask=mask[:, own])
    return errors, str(raised.value)


def _run(rank: int, ports: list[int], target: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    example = {}
    for layout, port in zip(LAYOUTS, ports, strict=False):
        os.environ["MASTER_PORT"] = str(port)
        example[layout[0]] = run_example(*layout)
    os.environ["MASTER_PORT"] = str(ports[-1])
    dist.init_process_group("gloo")
    results = xlstm_errors(), example, stack_error(), *tfla_errors()
    if rank == 0:
        torch.save(Found(*results), target)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("found") / "found.pt"
    start(2, _run, free_ports(len(LAYOUTS) + 1), target)
    return torch.load(target, weights_only=False)


@pytest.mark.parametrize("layout", ["dp_shard", "cp"])
def test_an_accelerated_xlstm_has_the_gradients_of_one_process(found: Found, layout: str) -> None:
    loss, gradients = found.xlstm[layout]
    assert loss < 1e-6  # transformers computes logits in float32
    assert gradients < 1e-11


@pytest.mark.parametrize("layout", [layout[0] for layout in LAYOUTS])
def test_the_example_prints_the_same_losses_in_every_layout(found: Found, layout: str) -> None:
    expected = run_example()
    assert len(expected) == 4
    assert found.example[layout] == pytest.approx(expected, rel=1e-5)


def test_a_stack_is_the_same_on_every_process(found: Found) -> None:
    assert found.stack < 1e-10


def test_positions_and_padding_of_a_model_of_transformers(found: Found) -> None:
    assert max(found.positions.values()) < 1e-10
    assert found.padding == "attention_mask: got padding with context parallelism, expected None or no padding"
