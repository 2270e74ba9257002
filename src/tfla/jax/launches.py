"""The lowering of plans of launches into functions of JAX: each launch is jaxlib's call of a Triton kernel.

A tensor that a plan allocates becomes an array of JAX whose memory is not filled. JAX has no arrays that are written
in place, and a plan does not say which of its tensors a kernel writes. Each allocated tensor that a kernel gets is
therefore an operand and a result of its call, with one memory for both, and later steps read the result. jaxlib gives a
kernel its operands and then its results: a tensor can be the kernel's last one once more, as the first result.

The steps of a plan name tensors by numbers: first what the plan is given, then each tensor in the order of its making.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array

from tfla.backends.gpu import side_by_side
from tfla.backends.gpu.planning import (
    AddTiles,
    Allocate,
    Copy,
    Describe,
    Fill,
    Gather,
    Launch,
    LaunchPlan,
    Places,
    Resize,
    Rows,
    ScaledColumns,
    Step,
    SumOf,
    Tiles,
)
from tfla.jax.inputs import vary, varying_axes
from tfla.jax.machine_code import with_machine_code

TARGET = "triton_kernel_call_ffi"  # of the plugin for CUDA, which loads and launches kernels
FIRST, LAST = (0, 10), (0, 12)  # versions of jaxlib with this target, the last excluded
DESCRIPTORS = (0, 11, 1)  # the first version with TMA descriptors; kernels that make some are tested from it on
ASSEMBLED = (0, 11, 1)  # the first version that takes assembled kernels; older ones assemble PTX one after the other


def jaxlib_version() -> tuple[int, ...]:
    """Return the version of jaxlib."""
    return tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])


@functools.cache
def unsupported() -> str | None:
    """Return why the installed jaxlib cannot launch Triton kernels, or None."""
    if not FIRST <= jaxlib_version() < LAST:
        return (
            f"it is tested with jaxlib {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1] - 1}, this is {jaxlib.__version__}"
        )
    try:
        from jaxlib import gpu_triton

        gpu_triton.TritonKernel, gpu_triton.TritonKernelCall, gpu_triton.create_array_parameter  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"it needs JAX's plugin for CUDA: {error}"
    return None


def descriptors_unsupported() -> str | None:
    """Return why the installed jaxlib cannot launch kernels with TMA descriptors, or None."""
    enough = jaxlib_version() >= DESCRIPTORS
    return None if enough else f"it needs jaxlib {'.'.join(map(str, DESCRIPTORS))} or newer"


def _used_parameters(ptx: str, name: str) -> set[int]:
    """Return the numbers of the parameters that the code of a kernel reads.

    Raises:
        RuntimeError: the text of the kernel is not there, so that every parameter would seem unread.
    """
    if f".entry {name}(" not in ptx:
        raise RuntimeError(
            f"kernel {name}: got {len(ptx)} characters of PTX without its entry, expected its code. A file of Triton's "
            "cache is damaged: empty the folder TRITON_CACHE_DIR, by default ~/.triton/cache"
        )
    found = [int(n) for n in re.findall(rf"\b{re.escape(name)}_param_(\d+)\b", ptx)]
    return {n for n in found if found.count(n) > 1}  # the first one is its declaration


class KernelCall:
    """The call of one launch: its kernel, its operands and what jaxlib has to be told of them.

    Args:
        launch: the launch.
        descriptors: the TMA descriptors of the plan, by their numbers.
        unused: the number of the tensor that is passed for parameters that the kernel does not read.
    """

    def __init__(self, launch: Launch, descriptors: dict[int, Describe], unused: int) -> None:
        from jaxlib import gpu_triton

        compiled = side_by_side.awaited(launch.compiled)
        metadata = compiled.metadata
        ptx, signature = compiled.asm["ptx"], compiled.src.signature
        self.name = str(metadata.name)
        used = _used_parameters(ptx, self.name)
        # Numbers of tensors, in the order of the parameters. One that the kernel does not read gets `unused`: XLA would
        # copy a tensor that is both another's memory and read.
        self.operands: list[int] = []
        parameters: list[Any] = []
        descriptions = iter(getattr(metadata, "tensordesc_meta", None) or ())
        names = launch.kernel.arg_names
        for name, n in zip(names, launch.read, strict=False):
            if signature[name] == "constexpr":  # None
                continue
            is_live = len(parameters) in used
            if n in descriptors:
                self.operands.append(descriptors[n].base if is_live else unused)
                parameters += self._descriptor(descriptors[n].descriptor, next(descriptions))
            else:
                self.operands.append(n if is_live else unused)
                parameters.append(gpu_triton.create_array_parameter(0, 16 if is_live else 0))
        for name, x in zip(names[len(launch.read) :], launch.numbers, strict=False):
            kind = signature[name]
            if kind != "constexpr":  # else it is compiled in, as Triton does with 1
                value = float(x) if kind.startswith("fp") else int(x)
                parameters.append(gpu_triton.create_scalar_parameter(value, kind))
        grid = (*launch.grid, 1, 1)[:3]
        # The memory in which programs make TMA descriptors is the parameter after those of the kernel. jaxlib would
        # allocate it in the launch, which then cannot be a part of a CUDA graph of XLA.
        self.scratch = int(metadata.global_scratch_size or 0) * math.prod(grid) * metadata.num_ctas
        if self.scratch:
            parameters.append(gpu_triton.create_array_parameter(0, metadata.global_scratch_align))
        if self.scratch and jaxlib_version() < DESCRIPTORS:
            raise NotImplementedError(f"TMA descriptors need jaxlib {'.'.join(map(str, DESCRIPTORS))} or newer")
        kernel = gpu_triton.TritonKernel(
            self.name, metadata.num_warps, metadata.num_ctas, metadata.shared, ptx, "", int(metadata.target.arch)
        )
        message = gpu_triton.TritonKernelCall(kernel, *grid, parameters).to_proto(self.name, b"")
        if jaxlib_version() >= ASSEMBLED:
            message = with_machine_code(message, self.name, int(metadata.shared), compiled.asm["cubin"])
        self.opaque = zlib.compress(message, 1)  # code hardly shrinks more at higher levels, which take longer

    @staticmethod
    def _descriptor(descriptor: Any, meta: dict[str, Any]) -> list[Any]:
        """Return the parameters of a TMA descriptor: the encoded one, its shape and its strides."""
        from jaxlib import gpu_triton
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        return [
            gpu_triton.create_tma_descriptor_parameter(  # type: ignore[attr-defined]
                elem_type=TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], swizzle=meta["swizzle"],
                shape=list(descriptor.shape), strides=list(descriptor.strides), block_shape=list(meta["block_size"]),
                oob_fill=0,
            ),
            *[gpu_triton.create_scalar_parameter(int(n), "i32") for n in descriptor.shape],
            *[gpu_triton.create_scalar_parameter(int(n), "i64") for n in descriptor.strides],
        ]  # fmt: skip

    def __call__(self, values: dict[int, Array], owned: set[int]) -> None:
        """Call the kernel.

        Args:
            values: the arrays by their numbers; the owned ones that the kernel gets are replaced by its results.
            owned: the numbers of tensors whose memory is the plan's own, so that kernels may write them.
        """
        operands = self.operands
        if operands[-1] in owned and operands[-1] in operands[:-1]:
            # XLA would copy the tensor for another parameter. Parameters after those for operands get results, so the
            # last one gets the first result, which has the memory of the tensor.
            operands = operands[:-1]
        last = self.operands[len(operands) :]
        written = {n: operands.index(n) for n in (*last, *operands) if n in owned}  # the operand that each tensor is
        if len(written) < sum(n in owned for n in operands):
            raise NotImplementedError(f"kernel {self.name} reads one tensor by two parameters")
        places = list(written.values())
        results = [jax.ShapeDtypeStruct(values[n].shape, values[n].dtype) for n in written]
        if self.scratch:  # the parameter after the last tensor gets the next result, which no operand has the memory of
            results.insert(len(last), jax.ShapeDtypeStruct((self.scratch,), jnp.uint8))
            places.insert(len(last), -1)
        call = jax.ffi.ffi_call(
            TARGET, results, input_output_aliases={place: n for n, place in enumerate(places) if place >= 0},
            has_side_effect=False,
        )  # fmt: skip
        axes = frozenset().union(*map(varying_axes, (values[n] for n in operands)))
        found = list(call(*[values[n] for n in operands], name=self.name, opaque=self.opaque))
        if self.scratch:
            del found[len(last)]
        values.update(zip(written, [vary(x, axes) for x in found], strict=True))


class _RowsOfTensors:
    """The rows of tensors that a plan takes so that one launch writes some of them and another launch the others.

    In PyTorch rows are a view of the tensor. Here they are arrays of their own, until a step reads the whole tensor,
    which is then made of them.

    Args:
        steps: the steps that take rows. Rows of one tensor are equal or do not overlap, and all together are the
            tensor.
    """

    def __init__(self, steps: Sequence[Rows]) -> None:
        self.first: dict[tuple[int, int, int], int] = {}  # the number of the first tensor of the same rows
        self.numbers = {s.result: self.first.setdefault((s.source, s.start, s.stop), s.result) for s in steps}
        self.parts: dict[int, dict[int, slice]] = {}  # of each tensor, the numbers of its rows in their order
        ends: dict[int, int] = {}
        for (source, start, stop), number in sorted(self.first.items()):
            if start != ends.get(source, 0):
                raise NotImplementedError(f"rows {start} to {stop} of a tensor do not follow other rows of it")
            ends[source] = stop
            self.parts.setdefault(source, {})[number] = slice(start, stop)

    def number(self, n: int) -> int:
        """Return the number of the tensor that stands for tensor n."""
        return self.numbers.get(n, n)

    def take(self, values: dict[int, Any], step: Rows) -> None:
        """Make the tensor of some rows, unless an earlier step has made it and none has read the whole since."""
        number = self.numbers[step.result]
        if number not in values:
            values[number] = jax.lax.optimization_barrier(values[step.source][step.start : step.stop])

    def overwritten(self, values: dict[int, Any], n: int) -> int:
        """Return the number of the tensor that a step writes for tensor n, and drop the rows that were taken of it."""
        for part in self.parts.get(n, ()):
            values.pop(part, None)
        return self.number(n)

    def join(self, values: dict[int, Any], read: Iterable[int]) -> None:
        """Replace those tensors of a step whose rows were taken by these rows, side by side.

        Raises:
            NotImplementedError: the rows that were taken are not the whole tensor.
        """
        for source in self.parts.keys() & set(read):
            own = {n: values.pop(n) for n in self.parts[source] if n in values}
            if own:
                old = values[source]
                whole = jnp.concatenate([own[n] if n in own else old[at] for n, at in self.parts[source].items()])
                if whole.shape != old.shape:
                    raise NotImplementedError(f"rows of shape {whole.shape} of a tensor of {old.shape}")
                values[source] = whole


def _read(step: Step) -> Sequence[int]:
    """Return the numbers of the tensors that a step other than a launch reads, but for those whose rows it takes."""
    if isinstance(step, Copy | Resize | Tiles | AddTiles | SumOf | Gather):
        return (step.source,)
    return step.sources if isinstance(step, ScaledColumns) else ()


class LoweredPlan:
    """A plan as a function that can be traced: it takes the arrays that the plan is given, and returns its results.

    An array is None where the plan has no such input.

    Args:
        plan: the plan.
        axis: the mesh axis over whose devices sequences are divided, for a plan that exchanges states.
    """

    def __init__(self, plan: LaunchPlan, axis: str | None = None) -> None:
        self.plan, self.axis = plan, axis
        overwritten = {n for n in plan.results if n < len(plan.given)}
        self.owned = overwritten | {step.result for step in plan.steps if isinstance(step, Allocate | Resize | Rows)}
        # XLA may call a kernel on a slice in the memory of the whole, and rows that another kernel wrote are lost. Rows
        # are therefore tensors of their own, which a step that reads the whole gets side by side.
        self.rows = _RowsOfTensors([step for step in plan.steps if isinstance(step, Rows)])
        descriptors = {step.result: step for step in plan.steps if isinstance(step, Describe)}
        first = plan.given.index(True)
        self.calls = [KernelCall(s, descriptors, first) if isinstance(s, Launch) else None for s in plan.steps]
        for call in filter(None, self.calls):
            call.operands = [self.rows.number(n) for n in call.operands]

    def __call__(self, given: Sequence[Array | None]) -> list[Array]:
        """Emit the steps on the given arrays and return the results."""
        with jax.enable_x64(True):  # else JAX makes float32 of the sums that kernels read as float64
            return self._emit(given)

    def _emit(self, given: Sequence[Array | None]) -> list[Array]:
        """Emit the steps, with the dtypes that they name."""
        values: dict[int, Any] = dict(enumerate(given))
        axes = frozenset().union(*(varying_axes(x) for x in given if x is not None))
        for step, call in zip(self.plan.steps, self.calls, strict=True):
            self.rows.join(values, call.operands if call is not None else _read(step))
            if isinstance(step, Allocate):
                made = jax.lax.empty(step.shape, jnp.dtype(str(step.dtype).removeprefix("torch.")))
                values[step.result] = vary(made, axes)
            elif isinstance(step, Fill):
                target = self.rows.overwritten(values, step.target)
                values[target] = vary(jnp.full_like(values[target], step.value), axes)
            elif isinstance(step, Copy):
                target = self.rows.overwritten(values, step.target)
                values[target] = values[self.rows.number(step.source)].astype(values[target].dtype)
            elif isinstance(step, Resize):
                x = values[step.source]
                margins = [(0, new - old, 0) for new, old in zip(step.shape, x.shape, strict=True)]
                values[step.result] = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
            elif isinstance(step, Rows):
                self.rows.take(values, step)
            elif isinstance(step, Tiles):
                x = values[step.source]
                by_rows = x.reshape(x.shape[0], step.rows, -1, *x.shape[2:])
                values[step.result] = by_rows[:, :, step.start : step.stop].reshape(x.shape[0], -1, *x.shape[2:])
            elif isinstance(step, AddTiles):
                x, total = values[step.source][step.row], values[step.target]
                by_rows = x.reshape(x.shape[0], step.stop - step.start, -1, *x.shape[2:])
                own = total[step.start : step.stop] + by_rows.sum(2).swapaxes(0, 1)
                values[step.target] = jnp.concatenate([total[: step.start], own, total[step.stop :]])
            elif isinstance(step, SumOf):
                values[step.result] = values[step.source][step.row].sum(0)
            elif isinstance(step, ScaledColumns):
                columns = [values[n] * f for n, f in zip(step.sources, step.factors, strict=True)]
                values[step.result] = jnp.concatenate(columns, 1)
            elif isinstance(step, Gather):
                values[step.result] = jax.lax.all_gather(values[step.source], self.axis)
            elif isinstance(step, Places):
                values[step.result] = vary(jax.lax.axis_index(self.axis)[None], axes)
            elif call is not None:
                call(values, self.owned)
        self.rows.join(values, self.plan.results)
        return [values[n] for n in self.plan.results]
