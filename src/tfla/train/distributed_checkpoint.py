"""Checkpoints that the processes of a run write together, through torch.distributed.checkpoint.

Every process writes its part of the parameters and of the optimizer's states. Any number of processes can read them.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tfla.nn.pretrained import load_alone


def start_saving(folder: Path, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> Future[Any]:
    """Copy this process's part of a checkpoint into main memory, and start to write it to an empty folder.

    Args:
        folder: a folder that every process can write to.
        model: the distributed model.
        optimizer: its optimizer.
        group: all processes, in a group that is used for nothing else, since a thread communicates through it.

    Returns:
        a future, which is done when the parts of all processes are written, or has the error of any of them.
    """
    writer = dcp.FileSystemWriter(folder, overwrite=True)
    future = dcp.async_save(_state(model, optimizer), storage_writer=writer, process_group=group)
    assert isinstance(future, Future)
    return future


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a checkpoint that any number of processes have written, on any number of processes."""
    state = _state(model, optimizer)
    if dist.is_initialized():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    else:
        load_alone(state, folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def distribute(
    model: nn.Module, optimizer: Optimizer, weights: dict[str, Tensor], optimizer_state: dict[str, Any]
) -> None:
    """Load the whole weights and the state of the optimizer that one process has saved into a distributed model."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(f"its weights are those of another model: {', '.join(sorted(own.keys() ^ weights.keys()))}")
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(_like(own[name], weight))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {name: _like(parameters[index], value) for name, value in values.items()}
        for index, values in optimizer_state["state"].items()
    }
    optimizer.load_state_dict({**optimizer_state, "state": state})


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this process's part of a tensor with the shape of a parameter; the tensor itself, if it has another shape.

    FSDP2 divides the part that tensor parallelism leaves, so that dimensions of the mesh are taken from the last one.
    """
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for at, size, placement in reversed(
        list(zip(coordinate, parameter.device_mesh.shape, parameter.placements, strict=True))
    ):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            width = -(-local.shape[dim] // size)
            start = min(at * width, local.shape[dim])
            local = local.narrow(dim, start, min(width, local.shape[dim] - start))
    found = torch.zeros_like(parameter.detach())
    assert isinstance(found, DTensor)
    found.to_local().copy_(local)
    return found


def cause(error: BaseException) -> BaseException:
    """Return the error behind one of torch.distributed.checkpoint: that of the first process that has one."""
    if isinstance(error, CheckpointException) and error.failures:
        return min(error.failures.items())[1][0]
    return error


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a checkpoint holds: parameters and states of the optimizer by name, as DTensors or plain tensors."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
