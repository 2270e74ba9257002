"""Compiles the kernels that forwards and backwards launch, for GPUs that need not be present.

python compile_for.py TARGET:CASE...    answers with one JSON line a job, in any order, its "kernels" one row each

TARGET is sm_90, gfx942, …; CASE = backend kernel gate dqk dhv dtype [packed] [segmented] [state] [grouped] [parallel]
[rows], with commas between, gate plain being linear attention without an input gate or a normalizer, parallel context
parallelism, and rows a forward of packed sequences whose states are rows of a pool; of decoding, whose kernel is
"steps", backend steps gate dqk dhv dtype [several] [low], low being a state in bfloat16. The delta rule is the kernel
"delta" with [packed] [state] [rows] [forward] [normalized] [activated] [strided] [float32] [single], strided being
strides that no TMA descriptor has, float32 the dtype of gates and beta, otherwise dtype, normalized a call that
normalizes q and k, with forward without gradients, activated one that activates its gates, sigmoid one that does so
without A_log and dt_bias, and single a call of one head; with [weighted] gla has input gates, too. Its decoding is
"delta_steps" with [several] [low]. Both have a model of MODELS as gate. With [lengths] the kernels are those that other
lengths would compile, on a GPU of PROCESSORS multiprocessors, and nothing is compiled. With [parallel] only the kernels
of context parallelism are compiled, and with [only=NAME+NAME] only those of these names. The short convolution of a
layer is the kernel "convolution", with its size, the channels and the dtype in place of gate and dims, and [bias]
[packed] [state]. The activations of the delta rule's inputs are the kernel "activations", with the activation of the
gates, dqk and the dtype, and [channels]. The norm with an output gate is the kernel "norm", with the activation, the
size of a row and the dtype, [first] where the gate comes first, [centered] for LayerNorm, and [skip] with a skip
connection. The losses of logits are the kernel "losses", with the vocabulary and the dtype, and the rotary embedding is
the kernel "rotation", with the channels of a head and the dtype. With [rows], [low] is a pool in bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from wgmma_descriptors import disassemble, unset_descriptors

import tfla
from tfla.backends import BACKENDS, DELTA_BACKENDS
from tfla.backends.delta import DeltaInputs
from tfla.nn import LanguageModel, ModelConfig, capped_loss, fused_step
from tfla.nn.mixers import fused_convolution, fused_norm, rotary
from tfla.ops import fused_activations

T, H = 256, 8  # with fewer heads than a program of the gate kernels has it would have more registers
SEGMENT = 128  # steps between stored states of what is segmented
LENGTHS = ((2, 1100), (1, 1100), (2, 1024), (1, 1025), (3, 2048), (17, 1024), (2, 700), (1, 70))  # sequences, steps
PROCESSORS = 132
KERNELS = ("triton.fused", "triton.paper.tfla", "triton.decode", "triton.delta", "triton.delta_decode", "hopper.fused")
# Models of the delta rule: the dims of their gates; whether they have a read key, which reads before the decay.
MODELS = {"deltanet": (0, False), "gdn": (1, False), "kda": (2, False), "gla": (2, False), "comba": (1, True)}


class AbsentGPU:
    """The part of a Triton driver that compilation needs, for a GPU that need not be present."""

    def __init__(self, name: str) -> None:
        number = name.removeprefix("sm_")
        self.target = GPUTarget("cuda", int(number), 32) if number != name else GPUTarget("hip", name, 64)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"


def unequal_sums(ptx: str) -> int:
    """Additions of what threads exchange that take in a thread's own product, unrounded, so that each thread gets
    another sum: see `times` in tfla.backends.gpu.state_passing."""
    count, exchanged = 0, set()
    for line in ptx.splitlines():
        exchange = re.match(r"\s*shfl\.sync\.bfly\.b32\s+(%\w+)", line)
        copy = re.match(r"\s*mov\.b(?:32|64)\s+(%\w+), \{?(%\w+)", line)
        if exchange or (copy and copy[2] in exchanged):
            exchanged.add((exchange or copy)[1])
        elif addition := re.match(r"\s*fma\.rn\S*\s+%\w+, %\w+, \S+, (%\w+);", line):
            count += addition[1] in exchanged
    return count


def assemble(
    self: CUDABackend, ptx: str, metadata: dict[str, Any], *rest: Any, disassembled: bool = True,
    make_cubin: Any = CUDABackend.make_cubin,
) -> bytes:  # fmt: skip
    """Triton's own last stage; what ptxas says of registers and spills is kept."""
    said = ""
    run = subprocess.run

    def listen(command: list[str], **options: Any) -> Any:
        nonlocal said
        result = run(command, **options)
        if "-v" in command:
            said += Path(options["stderr"].name).read_text()
        return result

    with mock.patch.object(subprocess, "run", listen):
        cubin = make_cubin(self, ptx, metadata, *rest)
    metadata["registers"] = sum(map(int, re.findall(r"Used (\d+) registers", said)))
    metadata["spilled"] = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    metadata["unequal"] = unequal_sums(ptx)
    metadata["unset"] = len(unset_descriptors(disassemble(cubin))) if disassembled and "wgmma" in ptx else 0
    metadata["serialized"] = said.count("instructions are serialized")  # ptxas waits after every wgmma
    return cubin


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, bytes of shared memory of a program."""
    shared = kernel.metadata.shared
    if "amdgcn" not in kernel.asm:
        names = ("registers", "spilled", "serialized", "unequal", "unset")
        return {"shared": shared} | {name: getattr(kernel.metadata, name) for name in names}
    said = {name: int(n) for name, n in re.findall(r"\.(vgpr_count|[sv]gpr_spill_count): +(\d+)", kernel.asm["amdgcn"])}
    spilled = 4 * (said["vgpr_spill_count"] + said["sgpr_spill_count"])
    return {"registers": said["vgpr_count"], "spilled": spilled, "shared": shared}


def compile_only(found: dict[str, dict[str, Any]], case: str = "") -> None:
    """Launches compile and do not run; what they compiled is added to `found`."""
    launch, variants = JITFunction.run, case.split(",")
    only = [name for x in variants if x.startswith("only=") for name in x.removeprefix("only=").split("+")]

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if "parallel" in variants and not self.__name__.startswith(("own_", "join_")):
            return None
        if only and self.__name__ not in only:
            return None
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is None:
            return None  # `note_only` has noted it
        name = self.__name__ + (" back" if kwargs.get("REVERSE") else "")
        name += "" if kwargs.get("OUTPUT", True) else " states"
        name += " indexed" if kwargs.get("INDEXED") else ""
        name += " leveled" if kwargs.get("LEVELED") else ""
        found[kernel.hash] = {"kernel": name, **resources(kernel)}
        return kernel

    JITFunction.run = run
    # Of Hopper's kernels descriptors are not looked at: they are written in Gluon, without such loops.
    CUDABackend.make_cubin = functools.partialmethod(assemble, disassembled=not case.startswith("hopper"))


def note_only(found: dict[str, dict[str, Any]]) -> None:
    """Add what launches would compile to `found`, without compiling it."""

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        found[f"{fn.name} {key}"] = {"kernel": fn.name}
        return True

    knobs.runtime.jit_cache_hook = note


def second_of_two() -> dist.ProcessGroup:
    """A group of two processes of which this is the second one; its collectives do nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def pool_dtype(variant: tuple[str, ...]) -> torch.dtype:
    """The dtype of a pool of states."""
    return torch.bfloat16 if "low" in variant else torch.float32


def forward_and_backward(
    sizes: tuple[int, int], chunk_size: int, backend: str, kernel: str, gate: str, dqk: str, dhv: str, dtype: str,
    *variant: str,
) -> None:  # fmt: skip
    type(BACKENDS[backend]).unsupported = lambda self, x: None  # type: ignore[method-assign]
    K, V, (B, T) = int(dqk), int(dhv), sizes
    shapes = ((H // (2 if "grouped" in variant else 1), K),) * 2 + ((H, V),)
    q, k, v = (torch.randn(B, T, *shape, dtype=getattr(torch, dtype), requires_grad=True) for shape in shapes)
    i, f = (torch.randn(B, T, H, requires_grad=True) for _ in range(2))
    if gate == "plain":
        leaves, operator = [q, k, v, f], tfla.linear_attention
    else:
        leaves, operator = [q, k, v, i, f], functools.partial(tfla.mlstm, input_gate=gate)
    operator = functools.partial(operator, *leaves, backend=backend, kernel=kernel)
    options: dict[str, Any] = {"chunk_size": SEGMENT if "segmented" in variant else chunk_size}
    if "parallel" in variant:
        options["context_parallel"] = second_of_two()
    if "packed" in variant:
        options["cu_seqlens"] = torch.tensor([0, T // 3, T])
    if "rows" in variant:
        pool = tfla.State.zeros(2, H, K, V, normalize=gate == "exp", dtype=pool_dtype(variant))
        with torch.no_grad():
            operator(initial_state=pool, state_indices=torch.tensor([1, 0]), return_state=True, **options)
        return
    if "state" in variant:
        shape = (2 if "packed" in variant else B, H)
        state = tfla.State(*(torch.randn(*shape, *d, requires_grad=True) for d in ((K, V), (K,), ())))
        state = state if gate == "exp" else tfla.State(state.C)
        h, last = operator(initial_state=state, return_state=True, **options)
        leaves += [x for x in state if x is not None]
        outputs = [h, *(x for x in (last.C, last.n) if x is not None)]
    else:
        outputs = [operator(**options)]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


def decoding(backend: str, gate: str, dqk: str, dhv: str, dtype: str, *variant: str) -> None:
    type(BACKENDS[backend]).steps_unsupported = lambda self, x: None  # type: ignore[method-assign]
    K, V, steps = int(dqk), int(dhv), 4 if "several" in variant else 1
    q, k, v = (torch.randn(2, steps, H, d, dtype=getattr(torch, dtype)) for d in (K, K, V))
    i, f = (torch.randn(2, steps, H) for _ in range(2))
    state = tfla.State.zeros(2, H, K, V, normalize=gate == "exp")
    if "low" in variant:
        state = state._replace(C=state.C.bfloat16())
    tfla.mlstm_steps(q, k, v, i, f, state, input_gate=gate, backend=backend)
    indices = torch.tensor([1, 0])
    tfla.mlstm_steps(q, k, v, i, f, state, input_gate=gate, backend=backend, state_indices=indices)
    if steps > 1:
        lengths = torch.tensor([1, 2])
        tfla.mlstm_steps(q, k, v, i, f, state, input_gate=gate, backend=backend, lengths=lengths)
        tfla.mlstm_steps(q, k, v, i, f, state, input_gate=gate, backend=backend, return_state=False)


def delta_inputs(
    model: str, B: int, T: int, K: int, V: int, dtype: str, padding: int = 0, gate_dtype: str | None = None, H: int = H
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a call and its further arguments, for gla those of linear attention."""
    gates, reads = MODELS[model]
    of_gates = getattr(torch, gate_dtype or dtype)
    q, k, v = (torch.randn(B, T, H, d + padding, dtype=getattr(torch, dtype))[..., :d] for d in (K, K, V))
    x: dict[str, Any] = {"q": q, "k": k, "v": v}
    if model != "gla":
        x["beta"] = torch.rand(B, T, H, dtype=of_gates)
    if gates:
        x["log_f"] = -torch.rand(B, T, H, *[K] * (gates == 2), dtype=of_gates)
    if reads:
        x["read_key"] = torch.rand_like(k)
    return x, {"read_before_decay": True} if reads else {}


def delta_forward_and_backward(backend: str, model: str, dqk: str, dhv: str, dtype: str, *variant: str) -> None:
    type(DELTA_BACKENDS[backend]).unsupported = lambda self, x: None  # type: ignore[method-assign]
    K, V = int(dqk), int(dhv)
    padding, gate_dtype = 4 if "strided" in variant else 0, "float32" if "float32" in variant else None
    heads = 1 if "single" in variant else H
    x, options = delta_inputs(model, 1, T, K, V, dtype, padding, gate_dtype, heads)
    if "weighted" in variant:
        x["log_i"] = -torch.rand(1, T, heads)
    options["backend"] = backend
    if "segmented" in variant:
        options |= {"kernel": "segmented", "chunk_size": SEGMENT}
    if "packed" in variant:
        options["cu_seqlens"] = torch.tensor([0, T // 3, T])
    if "rows" in variant:
        rows = torch.tensor([1, 0] if "packed" in variant else [1])
        options |= {
            "state_indices": rows,
            "initial_state": tfla.State(torch.zeros(2, heads, K, V, dtype=pool_dtype(variant))),
            "return_state": True,
        }
    if "normalized" in variant:
        options["normalize_qk"] = True
    if "activated" in variant:
        options["gate_activation"] = "softplus"
        x |= {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads, *[K] * (x["log_f"].dim() == 4))}
    if "sigmoid" in variant:
        options |= {"gate_activation": "sigmoid", "lower_bound": -5.0}
    keeps = "forward" not in variant or "normalized" not in variant
    leaves = {name: t.requires_grad_(keeps) for name, t in x.items()}
    operator = tfla.linear_attention if model == "gla" else tfla.delta_rule
    if "rows" in variant:
        with torch.no_grad():
            operator(**leaves, **options)
        return
    if "state" in variant:
        C = torch.randn(2 if "packed" in variant else 1, heads, K, V, requires_grad=keeps)
        h, last = operator(**leaves, initial_state=tfla.State(C), return_state=True, **options)
        outputs, leaves["C"] = [h, last.C], C
    else:
        outputs = [operator(**leaves, **options)]
    if "forward" not in variant:
        torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(t) for t in outputs])


def delta_decoding(backend: str, model: str, dqk: str, dhv: str, dtype: str, *variant: str) -> None:
    type(DELTA_BACKENDS[backend]).steps_unsupported = lambda self, x: None  # type: ignore[method-assign]
    K, V, steps = int(dqk), int(dhv), 4 if "several" in variant else 1
    x, options = delta_inputs(model, 2, steps, K, V, dtype)
    C = torch.randn(2, H, K, V, dtype=torch.bfloat16 if "low" in variant else torch.float32)
    if model == "gla":
        operator = tfla.linear_attention_steps
    else:
        operator = functools.partial(tfla.delta_rule_steps, normalize_qk=True, beta_activation="sigmoid")
    if MODELS[model][0] and model != "gla":
        options |= {"gate_activation": "softplus", "A_log": torch.randn(H), "dt_bias": torch.randn(H)}
    operator = functools.partial(operator, **x, state=tfla.State(C), backend=backend, **options)
    operator()
    operator(state_indices=torch.tensor([1, 0]))
    if steps > 1:
        operator(lengths=torch.tensor([1, 2]))
        operator(return_state=False)


def other_lengths(found: dict[str, dict[str, Any]], *case: str) -> None:
    """Leaves in `found` what is not compiled for the first of them."""
    chunk_size = T if "tfla" in case else 1 << 20
    first: set[str] = set()
    note_only(found)
    with mock.patch("tfla.backends.gpu.config.processors", return_value=PROCESSORS):
        for B, steps in LENGTHS:
            forward_and_backward((1, B * steps) if "packed" in case else (B, steps), chunk_size, *case)
            first = first or set(found)
    for kernel in first:
        del found[kernel]


def model_step(gate: str, dqk: str, dhv: str, dtype: str, *variant: str) -> None:
    """The fused step of a model, without the step of its recurrence."""
    batch = {"several": 8, "many": 64}[variant[0]] if variant else 1
    config = ModelConfig(
        d_model=H * int(dhv), qk_factor=int(dqk) / int(dhv), num_blocks=1, num_heads=H, vocab_size=50_304,
        mixer=f"mlstm_{gate[:3]}",  # type: ignore[arg-type]
    )  # fmt: skip
    with torch.device("meta"), torch.no_grad():
        model = LanguageModel(config).to(getattr(torch, dtype))
        step, state = fused_step.FusedStep(model, batch), model.initial_state(batch)
        with mock.patch.object(fused_step, "mlstm_step", lambda q, k, v, i, f, state, **_: (v, state)):
            step(torch.zeros(batch, dtype=torch.int64), state)


def short_convolution(size: str, channels: str, dtype: str, *variant: str) -> None:
    before = int(size) - 1 if "state" in variant else 0
    x = torch.randn(1, before + T, int(channels), dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.randn(int(channels), int(size), requires_grad=True)
    bias = torch.randn(int(channels)) if "bias" in variant else None
    first = torch.zeros(1, T, dtype=torch.int64) if "packed" in variant else None
    fused_convolution.convolve(x, weight, bias, first, before).sum().backward()


def activations(gate: str, dqk: str, dtype: str, *variant: str) -> None:
    channels = (int(dqk),) if "channels" in variant else ()
    q, k, v, f = (torch.randn(1, T, H, *dims, dtype=getattr(torch, dtype), requires_grad=True)
                  for dims in ((int(dqk),), (int(dqk),), (1,), channels))  # fmt: skip
    beta, A_log, bias = (torch.randn(*dims, requires_grad=True) for dims in ((1, T, H), (H,), (H, *channels)))
    x = DeltaInputs(q, k, v, beta, f, None, A_log, bias, None, None)
    out = fused_activations.activated(x, True, "sigmoid", gate, -5.0)  # type: ignore[arg-type]
    sum(t.sum() for t in (out.q, out.beta, out.log_f) if t is not None).backward()


def gated_norm(activation: str, dim: str, dtype: str, *variant: str) -> None:
    h, gate = (torch.randn(T, int(dim), dtype=getattr(torch, dtype), requires_grad=True) for _ in range(2))
    weight = torch.randn(int(dim), requires_grad=True)
    options = fused_norm.Options(1e-5, activation, "first" in variant, "centered" in variant)  # type: ignore[arg-type]
    skip = fused_norm.Skip(torch.randn_like(h).requires_grad_(), torch.randn(32, requires_grad=True))
    fused_norm.gated_norm(h, weight, gate, options, skip if "skip" in variant else None).sum().backward()


def rotation(channels: str, dtype: str) -> None:
    q = torch.randn(1, T, 4, int(channels), dtype=getattr(torch, dtype))
    rotary._rotated(q, rotary.cos_sin(torch.arange(T), int(channels) // 2, torch.float32))


def losses(vocabulary: str, dtype: str) -> None:
    x = torch.randn(4, int(vocabulary), dtype=getattr(torch, dtype), requires_grad=True)
    capped_loss._CappedLoss.apply(x, torch.zeros(4, dtype=torch.int64), 30.0).sum().backward()


def compile_case(case: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found.clear()
    failure = None
    try:
        backend, kernel, *rest = case.split(",")
        if kernel == "steps":
            decoding(backend, *rest)
        elif kernel == "model":
            model_step(*rest)
        elif kernel == "convolution":
            short_convolution(*rest)
        elif kernel == "activations":
            activations(*rest)
        elif kernel == "norm":
            gated_norm(*rest)
        elif kernel == "rotation":
            rotation(*rest)
        elif kernel == "losses":
            losses(*rest)
        elif kernel == "delta_steps":
            delta_decoding(backend, *rest)
        elif kernel == "delta":
            delta_forward_and_backward(backend, *rest)
        elif "lengths" in rest:
            other_lengths(found, backend, kernel, *rest)
        else:
            forward_and_backward((1, T), T, backend, kernel, *rest)
    except Exception:
        failure = traceback.format_exc()[-4000:]
    return {"case": case, "failure": failure, "kernels": list(found.values())}


def compile_for(job: str) -> dict[str, Any]:
    """Compile jobs in a process of their own, because Triton caches compiled kernels under the number of the GPU."""
    gc.disable()  # a process is short
    target, case = job.split(":")
    driver.set_active(AbsentGPU(target))
    found: dict[str, dict[str, Any]] = {}
    compile_only(found, case)
    return {"target": target, **compile_case(case, found)}


def prepare() -> None:
    """Do once what each of the processes would do: import, and hash Triton and the kernels."""
    torch.set_num_threads(1)
    importlib.import_module("sympy")  # which PyTorch imports in the first backward
    for module in KERNELS:
        with contextlib.suppress(ImportError):  # Triton is too old for Gluon
            importlib.import_module(f"tfla.backends.{module}")
    if hasattr(triton_cache, "triton_key"):
        triton_cache.triton_key()
    driver.set_active(AbsentGPU("sm_90"))
    for kernel in [
        x for x in gc.get_objects() if issubclass(type(x), JITFunction) and x.__module__.startswith("tfla.")
    ]:
        with contextlib.suppress(AttributeError):  # a Gluon kernel that calls what this Triton does not have
            _ = kernel.cache_key
    gc.freeze()


def main() -> None:
    prepare()
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as processes:
        for answer in processes.imap_unordered(compile_for, sys.argv[1:]):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
