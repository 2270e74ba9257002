"""Layers with tensor and context parallelism: what one process refuses is an error of all, eager and compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import Pool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tfla.distributed import parallel_model
from tfla.nn import LanguageModel, ModelConfig

MESHES: list[DeviceMesh] = []


def _message(group: dist.ProcessGroup, *, name: str, case: str, compiled: bool) -> str:
    """Return the message of a layer of which the processes with the first steps get other arguments.

    Args:
        name: the mixer.
        case: "state", "offsets", "steps" or a placement of x.
        compiled: the layer is compiled.
    """
    if not MESHES:
        MESHES.append(DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "tp")))
    mesh = MESHES[0]
    config = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=8, mixer=name)  # type: ignore[arg-type]
    model = LanguageModel(config)
    parallel_model._apply_tensor_parallel(model, mesh["tp"], {})
    layer: Any = model.blocks[0].mixer
    layer.context_parallel = mesh["cp"]
    first = mesh["cp"].get_local_rank() == 0
    x: torch.Tensor = torch.zeros(1, 6, 16, requires_grad=True)
    state, offsets = None, torch.tensor([0, 5, 12])
    if case == "state" and first:
        state = layer.initial_state(1, torch.device("cpu")) if name == "attention" else "a state"
    elif case == "offsets" and first:
        offsets = torch.tensor([0, 4, 12])
    elif case == "steps" and first:
        x = torch.zeros(1, 4, 16, requires_grad=True)
    elif case in PLACEMENTS and first:
        x = DTensor.from_local(x, mesh["tp"], [PLACEMENTS[case]], run_check=False)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with pytest.raises((TypeError, ValueError)) as refused:
        run(x, state, cu_seqlens=offsets)
    return str(refused.value)


PLACEMENTS = {"steps sharded": Shard(1), "width sharded": Shard(2), "partial": Partial()}
EXPECTED = {
    "state": {
        "gated_delta_net": "state: got str, expected MixerState",
        "attention": "cu_seqlens, state: got both",
    },
    "offsets": r"cu_seqlens: got offsets that differ among the 2 processes of .* \(3 up to 12, 3 up to 12\)",
    "steps": r"[qx]: got 4, 6 steps on the 2 processes of context_parallel, expected as many on each",
    "steps sharded": r"x: got placements \(Shard\(dim=1\),\), expected Replicate\(\)",
    "width sharded": r"x: got placements \(Shard\(dim=2\),\), expected Replicate\(\)",
    "partial": r"x: got placements \(Partial\(sum\),\), expected Replicate\(\)",
}
OF_ANOTHER = (
    "context_parallel: got arguments that process 0 of 2 refuses, with an error that names them, expected valid ones "
    "on each"
)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", EXPECTED)
@pytest.mark.parametrize("name", ["gated_delta_net", "attention"])
def test_every_process_raises(pool: Pool, name: str, case: str, compiled: bool) -> None:
    expected: Any = EXPECTED[case]
    found = pool.run(4, _message, name=name, case=case, compiled=compiled)
    for rank, message in enumerate(found):
        if case in ("offsets", "steps") or rank < 2:
            assert re.match(expected[name] if isinstance(expected, dict) else expected, message), message
        else:
            assert message == OF_ANOTHER
