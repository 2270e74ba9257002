"""The functions that ranks run in the tests of DTensors with the delta rule and gates by channel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import error
from delta_cases import MODELS, DeltaProblem, delta_problem
from delta_parts import PER_STEP, AnyProblem, call, problem_of
from several_writes import WritesProblem
from sharded_parts import MESHES, distribute, errors, full, message_of, step_errors
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import tfla

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "softplus": {"gate_activation": "softplus", "beta_activation": "2sigmoid", "normalize_qk": True},
    "sigmoid": {"gate_activation": "sigmoid", "beta_activation": "sigmoid", "lower_bound": -5.0},
}


def problem_with_parameters(given: dict[str, Any]) -> tuple[AnyProblem, dict[str, Tensor], dict[str, Any]]:
    """Return a problem, its leaves by the names of `distribute`, and the options of its call.

    With the argument "activation" the leaves have A_log and dt_bias besides.
    """
    given = dict(given)
    activation = given.pop("activation", None)
    p = problem_of(given)
    if isinstance(p, WritesProblem):
        return p, {name: p.flat(name, x) for name, x in p.leaves.items()}, {}
    leaves = {"C0" if name == "C" else name: x for name, x in p.leaves.items()}
    if activation is None:
        return p, leaves, {}
    draw = torch.Generator().manual_seed(1)
    H, K = p.x.v.shape[2], p.x.q.shape[3]
    by_channel = bool(MODELS[p.model][1])
    leaves["A_log"] = 0.3 * torch.randn(H, generator=draw, dtype=torch.float64)
    leaves["dt_bias"] = torch.randn((H, K) if by_channel else (H,), generator=draw, dtype=torch.float64)
    return p, leaves, ACTIVATIONS[activation]


def call_with(p: AnyProblem, leaves: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Call the public function over whole sequences, with its final state."""
    leaves = dict(leaves)
    if isinstance(p, WritesProblem):
        return p.call(leaves, return_state=True, **options)
    parameters = {name: leaves.pop(name) for name in ("A_log", "dt_bias") if name in leaves}
    if "C0" in leaves:
        leaves["C"] = leaves.pop("C0")
    return call(p, leaves, return_state=True, **parameters, **options)


def solve_sharded(
    group: dist.ProcessGroup,
    *,
    given: dict[str, Any],
    sizes: tuple[int, ...],
    shards: tuple[str, ...],
    **compiling: Any,
) -> dict[str, float]:
    """Return the errors of all quantities beside those of plain tensors, and the number of collectives."""
    p, leaves, options = problem_with_parameters(given)
    cotangents = {"v": p.dh, "C0": p.dC}
    return errors(lambda given: call_with(p, given, options), leaves, cotangents, sizes, shards, **compiling)


def heads_and_steps(group: dist.ProcessGroup, *, given: dict[str, Any]) -> dict[str, float]:
    """Return the errors of h and gradients beside those of one process; two ranks share heads, and two steps."""
    p, whole, options = problem_with_parameters(given)
    mesh, T = MESHES[2, 2], p.dh.shape[1] // 2
    cp, tp = mesh["dim0"], mesh["dim1"]
    first = T * cp.get_local_rank()

    def own(name: str, x: Tensor) -> Tensor:
        if name in ("C0", "A_log", "dt_bias"):
            return x
        writes = x.shape[1] // (2 * T)
        return x[:, first * writes : (first + T) * writes]

    plain = {name: x.clone().requires_grad_() for name, x in whole.items()}
    h, state = call_with(p, plain, options)
    truth = torch.autograd.grad([h, state.C], list(plain.values()), [p.dh, p.dC])
    leaves = {name: distribute(name, own(name, x), tp, ("heads",)).requires_grad_() for name, x in whole.items()}
    found, state = call_with(p, leaves, {**options, "context_parallel": cp})  # type: ignore[arg-type]
    cotangents = [distribute("v", own("v", p.dh), tp, ("heads",)), distribute("C0", p.dC / 2, tp, ("heads",))]
    grads = torch.autograd.grad([found, state.C], list(leaves.values()), cotangents)
    result = {"h": error(full(found), own("v", h))}
    for name, g, exact in zip(leaves, grads, truth, strict=True):
        local = full(g)
        if own(name, exact) is exact:
            dist.all_reduce(local, group=cp.get_group())
        result[name] = error(local, own(name, exact))
    return result


def solve_sharded_steps(
    group: dist.ProcessGroup, *, given: dict[str, Any], kind: str, sizes: tuple[int, ...], compiled: bool = False
) -> dict[str, float]:
    """Return the errors of decoding steps beside those of plain tensors, and the number of collectives."""
    p, one = delta_problem(**given), kind in ("step", "in place")
    plain = {name: x[:, 0] if one and name in PER_STEP else x for name, x in p.leaves.items()}
    plain["C0"] = plain.pop("C")
    options: dict[str, Any] = {"scale": p.scale}
    options |= {"in_place": True} if kind == "in place" else {}
    options |= {"return_state": False} if kind == "outputs" else {}

    def run(leaves: dict[str, Tensor], lengths: Tensor) -> Any:
        q, k, v, beta, log_f, read_key = (leaves.get(name) for name in PER_STEP)
        state = tfla.State(leaves["C0"])
        more = {**options, **({"lengths": lengths} if kind == "lengths" else {})}
        name = "step" if one else "steps"
        if not p.correct:
            return getattr(tfla, f"linear_attention_{name}")(q, k, v, log_f, state, **more)
        more |= {"read_key": read_key, "read_before_decay": p.read_before_decay}
        return getattr(tfla, f"delta_rule_{name}")(q, k, v, beta, state, log_f, **more)

    return step_errors(run, plain, torch.tensor([0, 2, 1, 2]), sizes, 1 if one else 2, compiled)


def refused(group: dist.ProcessGroup, *, what: str, compiled: bool = False) -> str:
    """Return the message of the exception of a call whose placements cannot work."""
    mesh = MESHES[2,]
    given: dict[str, Any] = {"model": "gla" if what.startswith("gla") else "gdn2", "B": 2, "T": 4, "K": 4, "V": 4}
    if "dplr" in what:
        given = {"function": "dplr", "B": 2, "T": 4, "K": 4, "V": 4}
    elif what == "bias":
        given["activation"] = "softplus"
    p, plain, options = problem_with_parameters(given)
    leaves: dict[str, Any] = {name: distribute(name, x, mesh, ("heads",)) for name, x in plain.items()}
    replaced: dict[str, tuple[str, Placement]] = {
        "channels": ("log_f", Shard(3)), "gla steps": ("log_f", Shard(1)), "beta": ("beta", Shard(0)),
        "read key": ("read_key", Replicate()), "bias": ("dt_bias", Replicate()), "dplr": ("b", Shard(3)),
    }  # fmt: skip
    if what in replaced:
        name, placement = replaced[what]
        leaves[name] = distribute_tensor(plain[name], mesh, [placement])
    elif what == "partial":
        leaves["beta"] = DTensor.from_local(plain["beta"], mesh, [Partial()], run_check=False)
    elif what in ("plain", "gla plain", "dplr plain"):
        leaves["k"] = plain["k"]
    elif what == "plain q":
        leaves["q"] = plain["q"]
    elif what.endswith("states"):
        options = {**options, "states_every": 2}

    def run(leaves: dict[str, Any]) -> Any:
        if what in ("indices", "gla indices", "step indices"):
            return _call_with_indices(p, leaves, what)  # type: ignore[arg-type]
        return call_with(p, leaves, options)

    return message_of(run, leaves, compiled)


def _call_with_indices(p: DeltaProblem, leaves: dict[str, Any], what: str) -> None:
    """Call an operator with rows of a pool of states."""
    indices, state = torch.tensor([0, 1]), tfla.State(leaves["C0"])
    q, k, v, beta, log_f = (leaves.get(name) for name in PER_STEP[:5])
    if what == "indices":
        tfla.delta_rule(q, k, v, beta, log_f, initial_state=state, state_indices=indices)  # type: ignore[arg-type]
    elif what == "gla indices":
        tfla.linear_attention(q, k, v, log_f, initial_state=state, state_indices=indices)  # type: ignore[arg-type]
    else:
        tfla.delta_rule_steps(q, k, v, beta, state, log_f, state_indices=indices)  # type: ignore[arg-type]
