"""The distribution of a model over a mesh of processes: tensor, data and context parallelism by PyTorch's own engine.

The steps are those of torchtitan, in its order: tensor parallelism, activation checkpointing, torch.compile, FSDP2.
Tensor parallelism is over heads: the projections into a mixer are split by columns, its output projection by rows, and
everything between works on the heads of one process without communication. docs/distributed.md shows how to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tfla.nn import HeadNorm, LanguageModel, MLSTMStack, SequenceMixer, SwiGLU
from tfla.nn.layers import Sharding, wrap_forward
from tfla.nn.mixers import Attention
from tfla.nn.validation import check_int
from tfla.ops.context_parallel.cuts import CONTIGUOUS, ORDERS
from tfla.ops.context_parallel.group import ContextParallel

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
Model = TypeVar("Model", bound=nn.Module)
Kind = TypeVar("Kind", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    activation_checkpointing: bool = False,
    compile: bool | str = False,
    reshard_after_forward: bool | None = None,
    blocks_per_gather: int = 1,
    prefetch: int | None = None,
    cp_order: str = CONTIGUOUS,
    blocks: Sequence[nn.Module] | None = None,
    tp_plan: dict[str, ParallelStyle] | None = None,
) -> Model:
    """Distribute a model over the processes of a mesh, in place.

    Every process builds the same model, calls this function, and then makes its optimizer of ``model.parameters()``.
    The names of the mesh's dimensions say what each of them is for; any of them may be missing or have size 1:

    - ``dp_replicate``: processes with different rows of the batch and a copy of the parameters each (HSDP).
    - ``dp_shard``: processes with different rows of the batch that share the parameters (FSDP2's ``fully_shard`` of
      each block and of the rest of the model).
    - ``cp``: processes that share the steps of each sequence, in order of their rank or as ``cp_order`` says. Every
      process passes its own part of ``ids`` and ``document_start`` (B, T / cp) to the model. Parameters are sharded
      over ``dp_shard`` and ``cp`` together.
    - ``tp``: processes that share the heads of each mixer, the hidden units of each feed-forward network and the
      vocabulary. They get the same rows and steps, and return the same logits.

    Gradients are averaged over ``dp_replicate``, ``dp_shard`` and ``cp``, as everywhere in PyTorch: with the mean loss
    over the tokens of this process, and equally many tokens on each, they are those of the mean over all tokens.

    Args:
        model: a :class:`tfla.nn.LanguageModel`, an xLSTM of transformers after
            :func:`tfla.integrations.transformers.accelerate`, or a module with layers of :mod:`tfla.nn`.
        mesh: a DeviceMesh with named dimensions over all processes, as ``init_device_mesh`` returns.
        mixed_precision: FSDP2's policy on the dtypes of parameters and of the reduction of gradients.
        activation_checkpointing: keep only the input of each block for the backward, and compute the block again there.
        compile: compile each block with torch.compile; a string is its backend.
        reshard_after_forward: whether a block's parameters are freed between forward and backward; None lets FSDP2
            choose, which frees them. On a mesh whose only size above 1 is that of ``tp``, where nothing is gathered,
            this and the next two have to be their defaults, and mixed_precision None.
        blocks_per_gather: the number of consecutive blocks whose parameters are gathered, and whose gradients are
            reduced, in one collective.
        prefetch: the number of further gathers that are started with each one, in forward and backward; None leaves
            the order to FSDP2, which starts a gather when the host comes to its block.
        cp_order: how the steps are cut over ``cp``, "contiguous" or, with attention layers, "zigzag", which gives all
            processes as many pairs of queries and keys; see :class:`ContextParallel`.
        blocks: the parts that are checkpointed, compiled and sharded as a unit; None takes the elements of the model's
            outermost ModuleLists.
        tp_plan: styles of torch.distributed.tensor.parallel for further modules, by their names in the model. They
            replace what this function would do with these modules.

    Returns:
        the same model.

    Raises:
        TypeError, ValueError: an argument does not fit, such as heads that ``tp`` does not divide; the message names
            it, what was given and what is allowed. The model is as it was.
    """
    sizes = mesh_sizes(mesh)
    check_model(model, sizes, tp_plan)
    blocks = _blocks(model) if blocks is None else blocks
    _check_blocks(model, blocks)
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
        got = type(mixed_precision).__name__
        raise TypeError(f"mixed_precision: got {got}, expected a torch.distributed.fsdp.MixedPrecisionPolicy")
    check_int("blocks_per_gather", blocks_per_gather, 1)
    if prefetch is not None:
        check_int("prefetch", prefetch, 1)
    if cp_order not in ORDERS:
        raise ValueError(f"cp_order: got {cp_order!r}, allowed are {', '.join(map(repr, ORDERS))}")
    if cp_order != CONTIGUOUS and sizes.get("cp", 1) == 1:
        raise ValueError(f"cp_order: got {cp_order!r}, expected {CONTIGUOUS!r} for a mesh without context parallelism")
    sharded = any(name != "tp" and size > 1 for name, size in sizes.items())
    if mixed_precision is not None and not sharded:
        raise ValueError("mixed_precision: got a policy, expected None for a mesh without data parallelism")
    only_sharded: dict[str, tuple[object, object]] = {
        "reshard_after_forward": (reshard_after_forward, None),
        "blocks_per_gather": (blocks_per_gather, 1),
        "prefetch": (prefetch, None),
    }
    for name, (given, default) in only_sharded.items():
        if given != default and not sharded:
            raise ValueError(f"{name}: got {given}, expected {default} for a mesh without data parallelism")

    if sizes.get("tp", 1) > 1:
        _apply_tensor_parallel(model, mesh["tp"], tp_plan or {})
    if sizes.get("cp", 1) > 1:
        for mixer in _context_parallel_layers(model):
            mixer.context_parallel = ContextParallel(mesh["cp"], order=cp_order)
    for block in blocks:
        # PyTorch 2.13 mixes up what a compiled checkpoint saves: the mesh, and the random state of torch's attention.
        attends_in_part = sizes.get("tp", 1) > 1 and any(True for _ in _modules(block, Attention))
        wrap_forward(block, activation_checkpointing, compile, compile_recomputation=not attends_in_part)
    if sharded:
        data_mesh = _data_mesh(mesh, sizes)
        policy = mixed_precision or MixedPrecisionPolicy()
        groups = [list(blocks[k : k + blocks_per_gather]) for k in range(0, len(blocks), blocks_per_gather)]
        for group in groups:
            # FSDP2 gathers before the first module of a group, and frees after the last one.
            fully_shard(group, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        at = _dimension_for_shards(sizes)
        fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=at)
        if prefetch is not None:
            _prefetch(model, [group[0] for group in groups], prefetch)
        model.register_forward_hook(_reshard_without_backward)
        if isinstance(model, LanguageModel):
            for block in model.blocks:
                register_fsdp_forward_method(block, "step")
                register_fsdp_forward_method(block, "steps")
            for name in ("losses", "step", "steps", "prefill", "read_prompt"):
                register_fsdp_forward_method(model, name)
                setattr(model, name, _resharding(model, getattr(model, name)))
    return model


def _prefetch(model: Any, first: Sequence[Any], count: int) -> None:
    """Let the gather of each group of blocks start those of ``count`` further ones, in forward and backward.

    Args:
        model: the model, whose gather starts those of the first groups in the forward.
        first: the first block of each group, which has its state of FSDP2, in the order of the forward.
        count: the number of groups.
    """
    model.set_modules_to_forward_prefetch(list(first[:count]))
    for k, block in enumerate(first):
        block.set_modules_to_forward_prefetch(list(first[k + 1 : k + 1 + count]))
        block.set_modules_to_backward_prefetch(list(first[max(0, k - count) : k][::-1]))


def _reshard_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free gathered parameters after an evaluation, which no backward does.

    While they are gathered, ``model.parameters()`` returns them, and ``model.zero_grad()`` would clear no gradient.
    """
    if not torch.is_grad_enabled():
        for module in _modules(model, FSDPModule):  # type: ignore[type-var]
            module.reshard()


def _resharding(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a model that frees gathered parameters as the forward does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        _reshard_without_backward(model, args, output)
        return output

    return run


def mesh_sizes(mesh: object) -> dict[str, int]:
    """Return the sizes of a mesh's dimensions by name.

    Raises:
        TypeError, ValueError: it is not a mesh, or a dimension has another name than :data:`DIMENSIONS`, or they are in
            another order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, expected a torch.distributed.DeviceMesh")
    names, allowed = mesh.mesh_dim_names, ", ".join(DIMENSIONS)
    if not names:
        raise ValueError(f"mesh: got dimensions without names, expected mesh_dim_names among {allowed}")
    if [name for name in DIMENSIONS if name in names] != list(names):
        raise ValueError(f"mesh: got the dimensions {', '.join(names)}, expected some of {allowed}, in this order")
    if "dp_replicate" in names and "dp_shard" not in names:
        raise ValueError("mesh: got dp_replicate without dp_shard, expected both; dp_shard may have size 1")
    return dict(zip(names, mesh.shape, strict=True))


def _modules(model: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Return the modules of a type within a model."""
    return (module for module in model.modules() if isinstance(module, kind))


def check_model(model: object, sizes: dict[str, int], tp_plan: dict[str, ParallelStyle] | None = None) -> None:
    """Raise unless a model can be distributed over dimensions of these sizes.

    Args:
        model: the model.
        sizes: the sizes of the mesh's dimensions by name.
        tp_plan: as in :func:`parallelize`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("model: got one whose parameters are distributed already, expected plain tensors")
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    mixers = [module for module in model.modules() if isinstance(module, SequenceMixer)]
    if tp > 1:
        _check_no_shared_parameters(model, tp)
    if tp > 1 and not mixers:
        raise ValueError(
            f"mesh: got tp of size {tp}, expected 1 for {type(model).__name__}, which has no mixer of tfla.nn"
        )
    if cp > 1 and not mixers and not any(True for _ in _context_parallel_layers(model)):
        raise ValueError(
            f"mesh: got cp of size {cp}, expected 1 for {type(model).__name__}, which never calls tfla.mlstm"
        )
    for mixer in mixers:
        kind = type(mixer).__name__
        if max(tp, cp) > 1 and mixer.batch_invariant:
            dim, size = ("tp", tp) if tp > 1 else ("cp", cp)
            raise ValueError(f"mesh: got {dim} of size {size}, expected 1 for a model with batch_invariant=True")
        if tp > 1 and not mixer.tensor_parallel:
            raise ValueError(
                f"mesh: got tp of size {tp}, expected 1 for {kind}, whose tensor_parallel does not say how processes "
                "share its modules"
            )
        for heads in {mixer.num_heads, getattr(mixer, "num_kv_heads", mixer.num_heads)}:
            if heads % tp:
                raise ValueError(f"mesh: got tp of size {tp}, expected a divisor of the {heads} heads")
    for layer in (*mixers, *_modules(model, MLSTMStack)):
        if cp > 1 and not hasattr(layer, "context_parallel"):
            why = "which has no exchange of states between processes"
            raise ValueError(f"mesh: got cp of size {cp}, expected 1 for {type(layer).__name__}, {why}")
    for ffn in _modules(model, SwiGLU):
        if ffn.down_proj.in_features % tp:
            raise ValueError(
                f"mesh: got tp of size {tp}, expected a divisor of the SwiGLU's width, {ffn.down_proj.in_features}"
            )
    for whole in _modules(model, LanguageModel):
        width, vocab, shards = whole.config.d_model, whole.config.vocab_size, _shards(sizes)
        if vocab % tp and width % shards:
            raise ValueError(
                f"mesh: got dp_shard x cp of size {shards} with tp of size {tp}, expected a divisor of the width, "
                f"{width}, where tp does not divide the vocabulary, {vocab}"
            )
    names = {name for name, _ in model.named_modules()}
    unknown = sorted(set(tp_plan or {}) - names)
    if unknown:
        raise ValueError(f"tp_plan: got {', '.join(unknown)}, expected names of modules of the model")


def _check_no_shared_parameters(model: nn.Module, tp: int) -> None:
    """Raise if a parameter belongs to two modules, of which tensor parallelism would make two parameters."""
    names: dict[int, str] = {}
    for at, module in model.named_modules():
        for name, parameter in module.named_parameters(at, recurse=False):
            if (other := names.setdefault(id(parameter), name)) != name:
                raise ValueError(f"mesh: got tp of size {tp}, expected 1 for a model whose {name} is its {other}")


def _context_parallel_layers(model: nn.Module) -> Iterator[Any]:
    """Return the layers of a model that call the operator: those of tfla.nn, and of transformers after `accelerate`."""
    return (module for module in model.modules() if hasattr(module, "context_parallel"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost ModuleLists of a model."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


def _check_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise unless the blocks are different modules of the model."""
    inside = set(model.modules())
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module) or block not in inside or block is model:
            raise ValueError(f"blocks[{number}]: got {type(block).__name__}, expected a module within the model")


def _data_mesh(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of FSDP2: (dp_shard x cp), or (dp_replicate, dp_shard x cp) for HSDP."""
    names = [name for name in ("dp_shard", "cp") if sizes.get(name, 1) > 1] or ["dp_shard"]
    shard = mesh[tuple(names)]._flatten("dp_shard_cp") if len(names) > 1 else mesh[names[0]]
    if sizes.get("dp_replicate", 1) == 1:
        return shard
    if len(names) == 1:
        return mesh["dp_replicate", names[0]]
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh["dp_replicate"], shard])
    return mesh["dp_replicate", "dp_shard_cp"]  # PyTorch before 2.10


def _dimension_for_shards(sizes: dict[str, int]) -> Callable[[nn.Parameter], Shard | None]:
    """Return the function by which FSDP2 chooses the dimension of a parameter that it divides; None is the first one.

    Where `tp` divides rows unevenly, as those of a vocabulary, and FSDP2 divides them once more, PyTorch 2.13 does not
    compute which rows a process has, and its checkpoints cannot be written. FSDP2 then divides columns.
    """
    tp, shards = sizes.get("tp", 1), _shards(sizes)

    def choose(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor) or parameter.dim() < 2 or not parameter.placements[0].is_shard(0):
            return None
        return Shard(1) if parameter.shape[0] % tp and parameter.shape[1] % shards == 0 else None

    return choose


def _shards(sizes: dict[str, int]) -> int:
    """Return the number of processes among which FSDP2 divides a parameter."""
    return sizes.get("dp_shard", 1) * sizes.get("cp", 1)


def _apply_tensor_parallel(model: nn.Module, tp: DeviceMesh, tp_plan: dict[str, ParallelStyle]) -> None:
    """Distribute the layers of :mod:`tfla.nn` in a model over heads, hidden units and vocabulary; replicate the rest.

    Every parameter becomes a DTensor on the mesh, so that one optimizer and one norm of gradients can hold them all.
    """
    plan: dict[str, ParallelStyle] = {}
    divided = {part for mixer in _modules(model, SequenceMixer) for part in mixer.modules()}  # type: ignore[type-abstract]
    for name, module in model.named_modules():
        at = f"{name}." if name else ""
        if isinstance(module, SequenceMixer):
            plan[name] = _Replicated()
            module.first_head = tp.get_local_rank() * (module.num_heads // tp.size())
            own = {part for part, _ in module.named_modules()}
            plan |= {at + part: STYLES[how]() for part, how in module.tensor_parallel.items() if part in own}
        elif isinstance(module, HeadNorm) and module in divided:
            plan[name] = _HeadsParallel()
        elif isinstance(module, SwiGLU):
            plan[name] = _Replicated()
            plan |= {at + "gate_proj": ColwiseParallel(), at + "up_proj": ColwiseParallel()}
            plan[at + "down_proj"] = RowwiseParallel()
        elif isinstance(module, LanguageModel):
            plan[at + "embedding"] = _Embedding(input_layouts=Replicate())
            plan[at + "unembedding"] = ColwiseParallel(output_layouts=Replicate())
    plan |= tp_plan
    for name, module in model.named_modules():
        if name not in plan and any(True for _ in module.parameters(recurse=False)):
            plan[name] = _Replicated()
    parallelize_module(model, tp, plan)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Distribute the parameters that a module itself has."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(key, nn.Parameter(distributed, parameter.requires_grad))


class _Embedding(RowwiseParallel):
    """The style of an embedding, whose vocabulary is split, with an output that is complete.

    The output of RowwiseParallel is an AsyncCollectiveTensor. As the input of a compiled block it would get a wrong
    gradient.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return outputs.redistribute(placements=output_layouts, async_op=False).to_local()


class _LocalStyle(ParallelStyle):
    """A style with one placement for a module's parameters, and one for its input and its output.

    Input and output are plain tensors. They are local parts, so that nothing is communicated.
    """

    parameters: Placement
    activations: Placement
    of_output: Placement | None = None  # the placement of the output's gradient; None is the output's own

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self.parameters)

        def wrap(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
            x, *rest = inputs
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self.activations], run_check=False)
            return (x, *rest)

        grads = None if self.of_output is None else [self.of_output]

        def unwrap(module: nn.Module, inputs: tuple[object, ...], y: object) -> object:
            return y.to_local(grad_placements=grads) if isinstance(y, DTensor) else y

        module.register_forward_pre_hook(wrap)
        module.register_forward_hook(unwrap)
        return module


class _Replicated(_LocalStyle):
    """The style of a module that every process computes in the same way, such as the norm of the residual stream.

    It is also that of a mixer, which makes its input a DTensor once for all of its projections: their gradients for the
    input are then summed before the one reduction over the processes.
    """

    parameters = activations = Replicate()


class _Repeated(_Replicated):
    """The style of a projection whose output the heads of every process read: its gradient is the sum of theirs."""

    of_output = Partial()


class _HeadsParallel(_LocalStyle):
    """The style of a norm over each head, on the heads of this process: (..., heads, head_dim)."""

    parameters, activations = Shard(0), Shard(-2)


class _ReadLocally(ParallelStyle):
    """A style that distributes parameters, which the module reads through :func:`tfla.nn.layers.local`."""

    parameters: Placement = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self.parameters)
        return module


class _HeadsReadLocally(_ReadLocally):
    """The style of :class:`_ReadLocally` for parameters whose first dimension belongs to heads."""

    parameters = Shard(0)


# The styles of :data:`tfla.nn.layers.Sharding`.
STYLES: dict[Sharding, type[ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "whole": _Replicated,
    "repeated": _Repeated,
    "heads": _HeadsReadLocally,
    "shared": _ReadLocally,
}
