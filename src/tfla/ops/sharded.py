"""The operators on DTensors that are sharded over the batch or the heads: each process computes its part alone.

Sequences and heads are independent of one another, so that no process needs anything of another one. Arguments are
checked, the operator runs on the local tensors, and its results get the placements of v. Heads of q and k are sharded
with those of v, or, where all heads of v share a single one, replicated. Its gradient is then a sum over processes
(`Partial`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tfla.ops.dispatch import Request
from tfla.ops.state import State

Results = Tensor | tuple[Tensor, State]
PLAIN_TOO = ("lengths", "cu_seqlens")  # arguments that may be plain tensors
KEYS = ("q", "k", "read_key", "a", "b")  # arguments that may have fewer heads than v
OF_STEPS = (*KEYS, "v", "i", "f", "log_i", "log_f", "beta")


class Dims(NamedTuple):
    """The dimensions of a tensor over which it may be sharded; None where it has none."""

    batch: int | None
    heads: int | None

    def of(self, placement: Placement) -> str | None:
        """Return what a placement shards: "batch", "heads", "nothing" where it replicates, or None for all others."""
        if isinstance(placement, Replicate):
            return "nothing"
        if type(placement) is Shard:
            found = {self.batch: "batch", self.heads: "heads"}
            return found.get(placement.dim)
        return None

    def placement(self, shards: str) -> Placement:
        """Return the placement that shards the batch, the heads or nothing."""
        dim = {"batch": self.batch, "heads": self.heads}.get(shards)
        return Replicate() if dim is None else Shard(dim)

    def allowed(self) -> str:
        """Return the placements of one dimension of the mesh that may be given."""
        found = [f"Shard({dim}) ({name})" for name, dim in self._asdict().items() if dim is not None]
        return " or ".join(["Replicate()", *found])


def dims_of(time: bool) -> dict[str, Dims]:
    """Return the dimensions of the arguments by name; ``time``: whether tensors have the dimension T."""
    of_steps = Dims(0, 2 if time else 1)
    of_states = Dims(0, 1)
    return {
        **dict.fromkeys(OF_STEPS, of_steps),
        **dict.fromkeys(("A_log", "dt_bias"), Dims(None, 0)),
        **{f"{name}.{part}": of_states for name in ("initial_state", "state") for part in State._fields},
        "lengths": Dims(0, None),
        "cu_seqlens": Dims(None, None),
    }


def _check(name: str, x: DTensor, dims: Dims, wanted: Sequence[str], mesh: DeviceMesh, shared: bool) -> None:
    """Check the mesh and the placements of one argument.

    Args:
        name: its name.
        x: the argument.
        dims: the dimensions over which it may be sharded.
        wanted: what v shards, for each dimension of the mesh.
        mesh: that of v.
        shared: it is one of :data:`KEYS` with a single head, which may be replicated where v's heads are sharded.
    """
    if x.device_mesh != mesh:
        raise ValueError(f"{name}: got a DTensor on {x.device_mesh}, expected one on the mesh of v, {mesh}")
    for j, placement in enumerate(x.placements):
        shards = dims.of(placement)
        if shards is None:
            raise ValueError(
                f"{name}: got placements {tuple(x.placements)}, expected {dims.allowed()} on each dimension of the "
                "mesh: steps and the sizes of heads are not sharded this way (tfla.distributed.ContextParallel cuts "
                "steps)"
            )
        if shards == wanted[j] or dims.placement(wanted[j]) == placement:
            continue
        if shared and shards == "nothing" and wanted[j] == "heads":
            continue
        raise ValueError(
            f"{name}: got placements {tuple(x.placements)}, expected {dims.placement(wanted[j])!r} on dimension {j} of "
            f"the mesh, where v shards {'no dimension' if wanted[j] == 'nothing' else 'its ' + wanted[j]}"
        )
    shares = _num_shares(mesh, [dims.of(placement) for placement in x.placements], "heads")
    if dims.heads is not None and x.shape[dims.heads] % shares:
        raise ValueError(
            f"{name}: got {x.shape[dims.heads]} heads sharded over {shares} processes, expected a multiple of {shares}"
        )


def _num_shares(mesh: DeviceMesh, shards: Sequence[str | None], name: str) -> int:
    """Return how many processes share what is sharded under this name."""
    found = 1
    for j, each in enumerate(shards):
        found *= mesh.size(j) if each == name else 1
    return found


def _fix_heads(x: DTensor, dims: Dims) -> None:
    """Make the numbers of heads, of all processes and of this one, constants of the graph that is traced.

    A graph of symbolic sizes cannot tell the one from the other where heads are sharded (PyTorch 2.13).
    """
    if dims.heads is not None:
        for each in (x, x.to_local()):
            len(range(each.shape[dims.heads]))  # a length is a constant


def _local(x: DTensor, wanted: Sequence[str]) -> Tensor:
    """Return the local tensor, whose gradient is a sum over the processes that have different rows or heads of v."""
    of_gradient = [
        Partial() if isinstance(placement, Replicate) and wanted[j] != "nothing" else placement
        for j, placement in enumerate(x.placements)
    ]
    return x.to_local(grad_placements=of_gradient)


def call_locally(
    given: Mapping[str, Tensor | None], time: bool, run: Callable[[dict[str, Tensor | None]], Results]
) -> Results:
    """Call an operator on local tensors.

    Args:
        given: the tensors of the call by name, those of a state as "state.C".
        time: whether they have the dimension T.
        run: the operator, from tensors by name to h, or to h and the state.

    Returns:
        what ``run`` returns, as DTensors: h with the placements of v, and the state with the same shards.

    Raises:
        TypeError: some arguments are DTensors and others are not.
        ValueError: an argument has another mesh or a placement that would need communication, or heads are not divided
            evenly; the message names the argument, what was given and what is allowed.
    """
    every, v = dims_of(time), given["v"]
    for name, x in given.items():
        if x is not None and not isinstance(x, DTensor) and name not in PLAIN_TOO:
            raise TypeError(f"{name}: got {type(x).__name__}, expected a DTensor, as other arguments are")
    assert isinstance(v, DTensor)
    wanted = _shards(v, every["v"])
    local: dict[str, Tensor | None] = {}
    for name, x in given.items():
        dims = every[name]
        if x is not None and name in PLAIN_TOO:
            _check_plain(name, x, wanted)
        if not isinstance(x, DTensor):
            local[name] = x
            continue
        per_head = wanted if dims.heads is not None else ["nothing" if w == "heads" else w for w in wanted]
        shared = name in KEYS and dims.heads is not None and x.shape[dims.heads] == 1
        if torch.compiler.is_compiling():
            _fix_heads(x, dims)
        _check(name, x, dims, per_head, v.device_mesh, shared)
        local[name] = _local(x, per_head)
    found = run(local)
    if isinstance(found, Tensor):
        return _sharded(found, every["v"], wanted, v)
    h, state = found
    parts = (None if t is None else _sharded(t, every["state.C"], wanted, v) for t in state)
    return _sharded(h, every["v"], wanted, v), State(*parts)  # type: ignore[arg-type]


def _shards(v: DTensor, dims: Dims) -> list[str]:
    """Return what v shards on each dimension of the mesh: "batch", "heads" or "nothing"."""
    found = [dims.of(placement) for placement in v.placements]
    if None in found:
        _check("v", v, dims, ["nothing"] * len(found), v.device_mesh, False)
    return found  # type: ignore[return-value]


def _check_plain(name: str, x: Tensor, wanted: Sequence[str]) -> None:
    """Check `lengths` or `cu_seqlens`, which may be plain tensors, equal on every process."""
    if "batch" not in wanted:
        return
    if name == "cu_seqlens":
        raise ValueError("cu_seqlens: got it with v sharded over the batch, expected one row of packed sequences")
    if not isinstance(x, DTensor):
        raise TypeError(f"{name}: got {type(x).__name__} with v sharded over the batch, expected a DTensor")


def _sharded(x: Tensor, dims: Dims, wanted: Sequence[str], v: DTensor) -> DTensor:
    """Return a local result as a DTensor with the shards of v."""
    mesh, placements = v.device_mesh, [dims.placement(shards) for shards in wanted]
    if v.shape[0] % _num_shares(mesh, wanted, "batch") == 0:
        return DTensor.from_local(x, mesh, placements, run_check=False)
    # Processes have unequal numbers of rows, from which the global shape cannot be told.
    assert dims.heads is not None
    shape = [v.shape[0], *x.shape[1:]]
    shape[dims.heads] *= _num_shares(mesh, wanted, "heads")
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# The public operators.


def call_with_state(
    given: Mapping[str, Tensor | None],
    state: State | None,
    run: Callable[[dict[str, Any], Any], Results],
    *,
    time: bool = True,
    name: str = "initial_state",
) -> Results:
    """Call an operator on local tensors and on the local part of a state.

    Args:
        given: the tensors of the call by name.
        state: the state; None is none.
        run: the operator, from local tensors by name and the local state to h, or to h and the state.
        time: whether tensors have the dimension T.
        name: the name of the state.

    Returns:
        what ``run`` returns, as DTensors.

    Raises:
        ValueError, TypeError: as :func:`call_locally`; or the state is no :class:`tfla.State`.
    """
    if state is not None and not isinstance(state, State):
        raise TypeError(f"{name}: got {type(state).__name__}, expected tfla.State")
    parts = {} if state is None else {f"{name}.{part}": t for part, t in zip(State._fields, state, strict=True)}

    def locally(local: dict[str, Tensor | None]) -> Results:
        own = [local[part] for part in parts]
        return run({each: local[each] for each in given}, State(*own) if own else None)  # type: ignore[arg-type]

    return call_locally({**given, **parts}, time, locally)


def named(request: Request, lengths: str) -> dict[str, Tensor | None]:
    """Return the tensors of a request by the names that they have for the caller, in the order of its fields."""
    gates = ("log_i", "log_f") if request.gates == "log" else ("i", "f")
    return dict(zip(("q", "k", "v", *gates, lengths), (*request[:5], request.lengths), strict=True))


def attend(request: Request, run: Callable[[Request], Results]) -> Results:
    """Compute a call over whole sequences by ``run`` on local tensors.

    Raises:
        ValueError, TypeError: as :func:`call_with_state`.
    """

    def locally(local: dict[str, Any], state: Any) -> Results:
        *tensors, lengths = local.values()
        return run(Request(*tensors, state, lengths, *request[7:]))  # type: ignore[call-arg]

    return call_with_state(named(request, "cu_seqlens"), request.state, locally)


def run_steps(
    given: Mapping[str, Tensor | None],
    state: State,
    state_indices: Tensor | None,
    run: Callable[[dict[str, Any], Any], tuple[Tensor, State]],
    *,
    time: bool,
    return_state: bool,
) -> tuple[Tensor, State]:
    """Compute decoding steps on local tensors.

    Args:
        given: the tensors of the call by name.
        state: the state before the steps.
        state_indices: rows of a pool, which are refused.
        run: the operator, from local tensors by name and the local state to h and the new state, whose tensors are
            empty without ``return_state``.
        time: whether tensors have the dimension T.
        return_state: whether there is a new state.

    Returns:
        h, and the new state or, without ``return_state``, the given one.

    Raises:
        ValueError, TypeError: as :func:`call_with_state`; or ``state_indices`` are given.
    """
    check_no_indices(state_indices)

    def locally(local: dict[str, Any], own: Any) -> Results:
        found = run(local, own)
        return found if return_state else found[0]

    found = call_with_state(given, state, locally, time=time, name="state")
    return (found, state) if isinstance(found, Tensor) else found


def check_no_indices(state_indices: Tensor | None) -> None:
    """Raise if the states of a call on DTensors are rows of a pool."""
    if state_indices is not None:
        raise TypeError("state_indices: got them with DTensors, expected plain tensors: call it on the local tensors")
