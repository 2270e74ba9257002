"""The functions that ranks run in the tests of DTensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import error, problem
from context_parts import PER_STEP, call_part
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tfla

MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def make_meshes(group: dist.ProcessGroup) -> None:
    """Make the meshes of all tests. Every process takes part in making each, also of those that it is not in."""
    for sizes in ((2,), (4,), (1, 2), (2, 2)):
        names = tuple(f"dim{j}" for j in range(len(sizes)))
        ranks = torch.arange(math.prod(sizes)).view(sizes)
        MESHES[sizes] = DeviceMesh("cpu", ranks, mesh_dim_names=names)


def distribute(name: str, x: Tensor, mesh: DeviceMesh, shards: tuple[str, ...], heads: int = 2) -> DTensor:
    """Return a tensor of the call as a DTensor; keys with one head are replicated over heads."""
    dims = {"batch": 0, "heads": 1 if name[-1] == "0" else heads}
    if name in ("A_log", "dt_bias"):
        dims = {"heads": 0}
    if name in ("q", "k", "read_key", "a", "b") and x.shape[heads] == 1:
        dims.pop("heads")
    placements = [Shard(dims[each]) if each in dims else Replicate() for each in shards]
    return distribute_tensor(x.detach(), mesh, placements)


def collectives_in(profile: Any) -> int:
    """Return the number of collectives of a profile."""
    return sum("c10d" in e.name for e in profile.events())


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def solve_sharded(
    group: dist.ProcessGroup,
    *,
    given: dict[str, Any],
    sizes: tuple[int, ...],
    shards: tuple[str, ...],
    remade: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Return the errors of all quantities beside those of plain tensors, and the number of collectives.

    Args:
        remade: the call gets DTensors that the compiled function has made.
        group, given, sizes, shards, options: as for :func:`errors`.
    """
    p = problem(**given)
    cotangents = {name: x for name, x in zip(("C0", "n0"), p.dstate, strict=False) if x is not None}

    def call(leaves: dict[str, Tensor]) -> Any:
        return call_part(p, {name: made_again(x) if remade else x for name, x in leaves.items()})

    return errors(call, p.leaves, {"v": p.dh, **cotangents}, sizes, shards, **options)


def made_again(x: Tensor) -> Tensor:
    """Return a DTensor made of the local tensor of one; plain tensors are as they are."""
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements) if isinstance(x, DTensor) else x


def errors(
    call: Callable[[dict[str, Tensor]], Any],
    leaves: dict[str, Tensor],
    cotangents: dict[str, Tensor],
    sizes: tuple[int, ...],
    shards: tuple[str, ...],
    compiled: bool = False,
    dynamic: bool | None = None,
) -> dict[str, float]:
    """Return the errors of all quantities of a call beside those of plain tensors, and the number of collectives.

    Those of a compiled call that have other bits than in eager mode have the error infinity.

    Args:
        call: from tensors by name to h and the final state.
        leaves: the plain tensors.
        cotangents: those of h, as "v", and of the parts of the final state, as "C0" and "n0".
        sizes, shards: of the mesh, and what each of its dimensions shards.
        compiled: compile the call.
        dynamic: that of torch.compile.
    """
    mesh = MESHES[sizes]
    plain = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    sharded = {name: distribute(name, x, mesh, shards).requires_grad_() for name, x in leaves.items()}

    def outputs(found: tuple[Tensor, tfla.State]) -> dict[str, Tensor]:
        every = {"v": found[0], "C0": found[1].C, "n0": found[1].n}
        return {name: x for name, x in every.items() if name in cotangents and x is not None}

    exact = outputs(call(plain))
    truth = torch.autograd.grad(list(exact.values()), list(plain.values()), list(cotangents.values()))
    torch._dynamo.reset()
    each = {name: distribute(name, x, mesh, shards) for name, x in cotangents.items()}

    def solve(fn: Callable[[dict[str, Tensor]], Any]) -> dict[str, Tensor]:
        found = outputs(fn(sharded))
        grads = torch.autograd.grad(list(found.values()), list(sharded.values()), list(each.values()))
        return {**found, **{f"d{name}": g for name, g in zip(sharded, grads, strict=True)}}

    fn = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic) if compiled else call
    eager = solve(call) if compiled else {}
    if compiled:
        fn(sharded)
    with torch.profiler.profile() as profile:
        found = solve(fn)
    count = collectives_in(profile)
    true = {**exact, **{f"d{name}": t for name, t in zip(plain, truth, strict=True)}}
    result = {name: error(full(found[name]), x) for name, x in true.items()}
    result |= {name: math.inf for name, x in eager.items() if not _same(x, found[name])}
    return {**result, "collectives": count}


def _same(x: Any, y: Any) -> bool:
    """Return whether two DTensors have the same placements and bits."""
    return x.placements == y.placements and x.shape == y.shape and torch.equal(x.to_local(), y.to_local())


def solve_sharded_steps(
    group: dist.ProcessGroup, *, given: dict[str, Any], kind: str, sizes: tuple[int, ...], compiled: bool = False
) -> dict[str, float]:
    """Return the errors of decoding steps beside those of plain tensors, and the number of collectives."""
    p, one = problem(**given), kind in ("step", "in place")
    plain = {name: x.detach() for name, x in p.leaves.items()}
    if one:
        plain = {name: x[:, 0] if name in PER_STEP else x for name, x in plain.items()}
    lengths = torch.tensor([0, 2, 1, 2])
    options: dict[str, Any] = {"in_place": True} if kind == "in place" else {}
    if kind == "outputs":
        options["return_state"] = False

    def run(leaves: dict[str, Tensor], lengths: Tensor) -> Any:
        state = tfla.State(leaves["C0"], leaves.get("n0"), leaves.get("m0"))
        more = {**options, **({"lengths": lengths} if kind == "lengths" else {})}
        q, k, v, i, f = (leaves.get(name) for name in PER_STEP)
        name = "step" if one else "steps"
        if p.form in ("plain", "normalized"):
            return getattr(tfla, f"linear_attention_{name}")(q, k, v, f, state, i, normalize=p.normalize, **more)
        return getattr(tfla, f"mlstm_{name}")(q, k, v, i, f, state, input_gate=p.form, **more)

    return step_errors(run, plain, lengths, sizes, 1 if one else 2, compiled)


def step_errors(
    run: Callable[[dict[str, Tensor], Tensor], Any],
    plain: dict[str, Tensor],
    lengths: Tensor,
    sizes: tuple[int, ...],
    heads: int,
    compiled: bool,
) -> dict[str, float]:
    """Return the errors of decoding steps beside those of plain tensors, and the number of collectives.

    Args:
        run: from tensors by name and lengths to h, or h and the new state.
        plain: the plain tensors; the state "C0" may be overwritten.
        lengths: those of the sequences.
        sizes: of the mesh, which shards the batch and the heads.
        heads: the dimension of heads of tensors with steps.
        compiled: compile the call.
    """
    mesh, shards = MESHES[sizes], ("batch", "heads")
    sharded = {name: distribute(name, x, mesh, shards, heads) for name, x in plain.items()}
    written = {name: x.clone() for name, x in plain.items()}

    def outputs(found: Any) -> list[Tensor]:
        return [found] if isinstance(found, Tensor) else [found[0], *(x for x in found[1] if x is not None)]

    with torch.no_grad():
        exact = outputs(run(written, lengths))
        torch._dynamo.reset()
        fn = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        placed = distribute_tensor(lengths, mesh, [Shard(0), Replicate()])
        with torch.profiler.profile() as profile:
            found = outputs(fn(sharded, placed))
        count = collectives_in(profile)
    result: dict[str, float] = {str(j): error(full(x), y) for j, (x, y) in enumerate(zip(found, exact, strict=True))}
    return {**result, "C": error(full(sharded["C0"]), written["C0"]), "collectives": count}


def message_of(call: Callable[[dict[str, Any]], Any], leaves: dict[str, Any], compiled: bool) -> str:
    """Return the message of the exception of a call whose arguments are refused, or "accepted"."""
    fn = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    expected: tuple[type[Exception], ...] = (torch._dynamo.exc.Unsupported,) if compiled else (TypeError, ValueError)
    try:
        fn(leaves)
    except expected as refusal:
        return str(refusal)
    return "accepted"


def refused(group: dist.ProcessGroup, *, what: str, compiled: bool = False) -> str:
    """Return the message of the exception of a call whose placements cannot work."""
    mesh = MESHES[2,]
    p = problem("exp", B=2, T=4, H=3 if what == "odd heads" else 2, Hq=1 if what == "odd heads" else 2, K=4, V=4)
    if what == "packed":
        p = problem("exp", lengths=(2, 2), K=4, V=4)
    shards = ("batch",) if what in ("packed", "lengths") else ("heads",)
    if what == "odd heads":
        leaves: dict[str, Any] = {
            name: distribute_tensor(x, mesh, [Shard(1 if name[-1] == "0" else 2) if name not in "qk" else Replicate()])
            for name, x in p.leaves.items()
        }
    else:
        leaves = {name: distribute(name, x, mesh, shards) for name, x in p.leaves.items()}
    replaced: dict[str, tuple[str, Any]] = {
        "steps": ("q", Shard(1)), "sizes": ("k", Shard(3)), "values": ("v", Shard(1)), "mismatch": ("i", Shard(0)),
        "state": ("C0", Shard(0)), "replicated keys": ("k", Replicate()),
    }  # fmt: skip
    if what in replaced:
        name, placement = replaced[what]
        leaves[name] = distribute_tensor(p.leaves[name], mesh, [placement])
    elif what == "partial":
        leaves["f"] = DTensor.from_local(p.f, mesh, [Partial()], run_check=False)
    elif what == "plain":
        leaves["v"] = p.v
    elif what == "plain q":
        leaves["q"] = p.q
    elif what == "mesh":
        leaves["k"] = distribute_tensor(p.k, MESHES[1, 2], [Replicate(), Shard(2)])

    def call(leaves: dict[str, Any]) -> Any:
        if what != "lengths":
            return call_part(p, leaves)
        state = tfla.State(leaves["C0"], leaves["n0"], leaves["m0"])
        steps = (leaves[name] for name in PER_STEP)
        return tfla.mlstm_steps(*steps, state, lengths=torch.tensor([1, 2]))  # type: ignore[misc]

    return message_of(call, leaves, compiled)
