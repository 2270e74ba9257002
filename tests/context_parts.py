"""The functions that ranks run in the tests of context parallelism."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Problem, error, gradients, problem
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tfla
from tfla.distributed import ContextParallel
from tfla.ops.context_parallel import exchange, own_states

PER_STEP = ("q", "k", "v", "i", "f")


def own_steps(rank: int, size: int, order: str, lengths: tuple[int, ...]) -> Tensor:
    """Return the steps of a rank in the order of its tensors."""
    spans = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    ours = [spans[rank]] if order == "contiguous" else [spans[rank], spans[2 * size - 1 - rank]]
    return torch.cat([torch.arange(a, b) for a, b in ours])


def part(p: Problem, steps: Tensor, share: float, dtype: torch.dtype | None = None) -> Problem:
    """Return the problem of one rank; `share`: its share of the cotangents of the final states."""
    own = {name: x[:, steps] for name in PER_STEP if (x := getattr(p, name)) is not None}
    dstate = tfla.State(*(None if x is None else x * share for x in p.dstate))
    return p.but(**own, dh=p.dh[:, steps], dstate=dstate)


def solve_part(
    group: dist.ProcessGroup,
    *,
    given: dict[str, Any],
    order: str,
    lengths: tuple[int, ...],
    m: Tensor | None,
    share: float,
    backend: str = "chunkwise",
    dtype: torch.dtype = torch.float64,
    compiled: bool = False,
    bare: bool = False,
    normalizer_grad: bool = True,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Tensor]:
    """Return all quantities of this rank's part.

    Args:
        group: the ranks.
        given: the arguments of `problem`.
        order, lengths: of :class:`ContextParallel`.
        m: the max state on whose scale final states are compared.
        share: this rank's share of the cotangents of the final states.
        backend: the backend.
        dtype: of q, k and v.
        compiled: compile the call.
        bare: pass the group itself, for equal contiguous parts.
        normalizer_grad: as in the call.
        device: of the tensors.
        options: further options of the call.
    """
    p = problem(**given, dtype=dtype).but(normalizer_grad=normalizer_grad)
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    context = group if bare else ContextParallel(group, order=order, lengths=lengths)
    ours = part(p, steps, share)
    leaves = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in ours.leaves.items()}

    def run(leaves: dict[str, Tensor]) -> tuple[Tensor, tfla.State]:
        return call_part(ours, leaves, context_parallel=context, backend=backend, **options)

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    h, state = run(leaves)
    return gradients(ours, leaves, h, state, m)


def call_part(p: Problem, leaves: dict[str, Tensor], **options: Any) -> Any:
    """Call the public function on these leaves; offsets stay on the CPU."""
    state = tfla.State(leaves["C0"], leaves.get("n0"), leaves.get("m0")) if "C0" in leaves else None
    options = {
        "initial_state": state, "return_state": True, "cu_seqlens": p.cu_seqlens,
        "normalizer_grad": p.normalizer_grad, **options,
    }  # fmt: skip
    q, k, v, i, f = (leaves.get(name) for name in PER_STEP)
    if p.form in ("plain", "normalized"):
        return tfla.linear_attention(q, k, v, f, i, normalize=p.normalize, **options)  # type: ignore[arg-type]
    return tfla.mlstm(q, k, v, i, f, input_gate=p.form, **options)  # type: ignore[call-overload]


def outputs_alone(group: dist.ProcessGroup, *, given: dict[str, Any], order: str, lengths: tuple[int, ...]) -> Tensor:
    """Return h of this rank without gradients and without final states."""
    p = problem(**given)
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    ours = part(p, steps, 0.0)
    # In a dense batch the initial state is read on the first rank alone.
    state = None if dist.get_rank(group) and p.cu_seqlens is None else p.state
    context = ContextParallel(group, order=order, lengths=lengths)
    with torch.no_grad():
        found: Tensor = call_part(ours, ours.leaves, initial_state=state, return_state=False, context_parallel=context)
    return found


def collectives(group: dist.ProcessGroup, *, form: str) -> tuple[int, list[int]]:
    """Return how many collectives a forward and a backward have, and how many numbers a rank gives to each."""
    p = problem(form, B=2, H=3, Hq=3, K=5, V=7, T=12, carried=False)
    steps = own_steps(dist.get_rank(group), 2, "contiguous", (6, 6))
    ours = part(p, steps, 0.0)
    leaves = [x.clone().requires_grad_() for x in (ours.q, ours.k, ours.v, ours.i, ours.f) if x is not None]
    with torch.profiler.profile(record_shapes=True) as profile:
        h = tfla.mlstm(*leaves, input_gate=form, context_parallel=group)  # type: ignore[arg-type]
        h.backward(ours.dh)
    gathers = [e for e in profile.events() if e.name == "_c10d_functional::all_gather_into_tensor"]
    assert len([e for e in profile.events() if e.name.startswith("c10d::")]) == len(gathers)  # nothing else is sent
    return len(gathers), [math.prod(e.input_shapes[0]) for e in gathers]


def captured(group: dist.ProcessGroup, *, form: str, chunk_size: int | None) -> bool:
    """Return whether a captured forward and backward give, on other inputs, what eager ones give."""
    shapes = [(1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4), (1, 512, 4)]

    def call(*leaves: Tensor) -> Tensor:
        return tfla.mlstm(*leaves, input_gate=form, context_parallel=group, chunk_size=chunk_size)  # type: ignore[call-overload,no-any-return]

    return replays_on_other_inputs(group, shapes, call)


def replays_on_other_inputs(
    group: dist.ProcessGroup, shapes: list[tuple[int, ...]], call: Callable[..., Tensor]
) -> bool:
    """Return whether a captured call and its backward give, on other inputs, the bits that eager ones give.

    Args:
        group: the ranks.
        shapes: the shapes of the inputs, in bfloat16 those of four dimensions.
        call: inputs -> h.
    """
    draw = torch.Generator("cuda").manual_seed(dist.get_rank(group))

    def inputs() -> list[Tensor]:
        found = [torch.randn(shape, generator=draw, device="cuda") for shape in shapes]
        return [x.bfloat16() if x.dim() == 4 else x for x in found]

    def run(leaves: list[Tensor]) -> list[Tensor]:
        h = call(*leaves)
        return [h, *torch.autograd.grad(h.float().square().sum(), leaves)]

    static = [x.requires_grad_() for x in inputs()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(static)
    given = inputs()
    with torch.no_grad():
        for x, new in zip(static, given, strict=True):
            x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    exact = run([x.requires_grad_() for x in given])
    return all(torch.equal(x, y) for x, y in zip(outputs, exact, strict=True))


def compiled_sizes(group: dist.ProcessGroup, *, order: str, packed: bool) -> tuple[float, int]:
    """Return the largest error of one compiled function at several sizes, and how many graphs it was compiled to."""
    context = ContextParallel(group, order=order)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def run(*leaves: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        h: Tensor = tfla.mlstm(*leaves, cu_seqlens=cu_seqlens, context_parallel=context)  # type: ignore[arg-type]
        return h

    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    worst = 0.0
    for B, T in ((1, 6), (1, 12), (1, 10), (1, 14)) if packed else ((2, 6), (3, 6), (5, 6), (4, 10), (3, 14)):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        p = problem("exp", B=B, T=T * size, H=2, Hq=1, carried=False)
        offsets = torch.tensor([0, 5, T * size - 3, T * size]) if packed else None
        ours = part(p, own_steps(rank, size, order, (T // 2,) * 2 * size if order == "zigzag" else (T,) * size), 0.0)
        leaves = [x.clone().requires_grad_() for x in (ours.q, ours.k, ours.v, ours.i, ours.f) if x is not None]
        found = []
        for call in (run, compiled):
            h = call(*leaves, cu_seqlens=offsets)
            found.append([h, *torch.autograd.grad(h, leaves, ours.dh)])
        worst = max(worst, *(error(a.detach(), b.detach()) for a, b in zip(*found, strict=True)))
    return worst, graphs.frame_count


def refused(group: dist.ProcessGroup, *, what: str) -> str:
    """Return the message of the exception of a call that is invalid on every rank."""
    p = problem("exp", B=2, T=6)
    offsets = {"offsets": [0, 6], "falling": [0, 9, 4, 12], "batch": [0, 12], "steps": None}.get(what)
    if what in ("offsets", "falling"):
        p = problem("exp", lengths=(6,), carried=False)
    if what == "odd":
        p = problem("exp", B=2, T=5)
    if what == "state":
        p = p.but(state=problem("exp", B=3, T=6).state)
    q, k, v, i, f = (x for name in PER_STEP if (x := p.leaves.get(name)) is not None)
    options: dict[str, Any] = {"initial_state": p.state}
    if offsets is not None:
        options |= {"cu_seqlens": torch.tensor(offsets), "initial_state": None}
    try:
        context: Any = group
        if what == "type":
            context = "cp"
        elif what == "mesh":
            ranks = torch.arange(2).view(1, 2)
            context = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"), _init_backend=False)
        elif what == "order":
            context = ContextParallel(group, order="ring")
        elif what in ("lengths", "length type"):
            context = ContextParallel(group, lengths=(3, 4, 5) if what == "lengths" else (3, 4.5))  # type: ignore[arg-type]
        elif what == "steps":
            context = ContextParallel(group, lengths=(5, 5))
        elif what == "odd":
            context = ContextParallel(group, order="zigzag")
        elif what == "outside":
            ContextParallel(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
        if what == "transform":
            torch.func.grad(lambda q: tfla.mlstm(q, k, v, i, f, context_parallel=context).sum())(q)
        elif what == "twice":
            q = q.clone().requires_grad_()
            h = tfla.mlstm(q, k, v, i, f, context_parallel=context)
            (grad,) = torch.autograd.grad(h.sum(), q, create_graph=True)
            torch.autograd.grad(grad.square().sum(), q)
        else:
            tfla.mlstm(q, k, v, i, f, context_parallel=context, **options)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as refusal:
        return str(refusal)
    return "accepted"


def heads_and_steps(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return h and gradients of the whole problem, whose heads and steps are each shared by two of the four ranks."""
    p = problem("exp", B=2, T=12, H=4, Hq=2)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "tp"))
    steps = torch.arange(6) + 6 * mesh["cp"].get_local_rank()
    ours = part(p, steps, 0.5)

    def distributed(name: str, x: Tensor) -> DTensor:
        return distribute_tensor(x.detach(), mesh["tp"], [Shard(1 if name[-1] == "0" else 2)])

    leaves = {name: distributed(name, x).requires_grad_() for name, x in ours.leaves.items()}
    h, state = call_part(ours, leaves, context_parallel=mesh["cp"])
    cotangents = [distributed("v", ours.dh), distributed("C0", ours.dstate.C), distributed("n0", ours.dstate.n)]
    grads = torch.autograd.grad([h, state.C, state.n], list(leaves.values()), cotangents)
    found = {"h": h, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}
    result = {}
    for name, x in found.items():
        every = funcol.all_gather_tensor(x.full_tensor().contiguous(), 0, mesh["cp"]).chunk(2)
        every = [part.detach() for part in every]
        result[name] = torch.cat(every, 1) if name[-1] != "0" else every[0] + every[1]
    return result


def solve_with_segments(group: dist.ProcessGroup, **arguments: Any) -> dict[str, Any]:
    """Return what `solve_part` does, how many products over steps were computed besides those of the kernels, and how
    many numbers this rank gave to each collective.

    It is called twice: the second call replays recorded launches.
    """
    count, product, sizes, gather = 0, own_states.weighted_product, list[int](), exchange.start_gather

    def sized(rows: Tensor, *args: Any) -> Tensor:
        sizes.append(rows.numel())
        return gather(rows, *args)

    def counted(*args: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return product(*args)

    own_states.weighted_product, exchange.start_gather = counted, sized
    simulator: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if arguments["backend"] == "hopper":
        from gluon_simulator.hopper import on_cpu

        simulator = on_cpu()
    try:
        with simulator:
            solve_part(group, **arguments)
            sizes.clear()
            return {**solve_part(group, **arguments), "products": count, "sizes": sizes}
    finally:
        own_states.weighted_product, exchange.start_gather = product, gather
