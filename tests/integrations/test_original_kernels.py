"""The comparison with the other libraries' own Triton kernels, on a GPU or in Triton's interpreter.

The truth is this library in float64, which other tests compare with formulas and naive references. A kernel that fails
on this GPU or with this version of Triton is skipped, with the reason.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import INTERPRETED, TOLERANCE, error
from torch import Tensor

from tfla.bench.baselines import mamba_module
from tfla.bench.parallel_compilation import compiled_together
from tfla.integrations import fla, mamba, mlstm_kernels
from tfla.integrations.fla.replacement import MODULES

ORIGINAL_TOLERANCE = 3e-2  # of kernels that round intermediate results; the error of a wrong function is about 1
Results = list[Tensor]


@pytest.fixture(autouse=True, scope="module")
def tuned_briefly() -> Iterator[None]:
    """Compile the hundreds of configurations of the originals' autotuners at once, and time each only briefly."""
    with compiled_together():
        yield


@pytest.fixture
def on(device: str) -> str:
    """Return the device, or skip the test where the originals cannot run."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("their kernels need a GPU or Triton's interpreter")
    return device


def solve(run: Callable[..., Any], given: dict[str, Tensor], backward: bool, **options: Any) -> Results:
    """Return all results and, with `backward`, the gradients of all inputs from a cotangent of the first result."""
    leaves = {name: t.detach().clone().requires_grad_(backward) for name, t in given.items()}
    with torch.set_grad_enabled(backward):
        found = run(**leaves, **options)
    outputs = (
        [found] if isinstance(found, Tensor) else [found[0], *(found[1] if isinstance(found[1], tuple) else found[1:])]
    )
    outputs = [t for t in outputs if t is not None]
    if not backward:
        return outputs
    torch.manual_seed(2)
    cotangent = torch.randn(outputs[0].shape, dtype=torch.float64).to(outputs[0])
    return [*outputs, *torch.autograd.grad(outputs[0], list(leaves.values()), cotangent)]


def solve_exactly(
    run: Callable[..., Any], given: dict[str, Tensor], backward: bool = True, **options: Any
) -> tuple[Results, Results]:
    """Compare the results with those in float64, and return both."""
    ours = solve(run, given, backward, **options)
    exact = solve(run, {name: t.double() for name, t in given.items()}, backward, **options)
    allowed = max(TOLERANCE[t.dtype] for t in given.values())
    for at, (a, truth) in enumerate(zip(ours, exact, strict=True)):
        assert error(a, truth) <= allowed, at
    return ours, exact


def compare(
    run: Callable[..., Any],
    original: Callable[..., Any],
    given: dict[str, Tensor],
    backward: bool = True,
    **options: Any,
) -> None:
    """Compare the results of `run` and of `original` with those of `run` in float64."""
    try:
        theirs = solve(original, given, backward, **options)
    except Exception as failure:
        pytest.skip(f"theirs does not run here: {type(failure).__name__}: {failure}"[:200])
    ours, exact = solve_exactly(run, given, backward, **options)
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    for at, (b, truth) in enumerate(zip(theirs, exact, strict=True)):
        assert error(b, truth) <= ORIGINAL_TOLERANCE, at


def head_first(device: str, dtype: torch.dtype, S: int, d: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (d,), "k": (d,), "v": (d,), "i": (), "f": ()}
    x = {name: torch.randn(1, 1 if device == "cpu" else 4, S, *shape) for name, shape in shapes.items()}
    x["f"] = x["f"] + 3
    return {name: t.to(device, torch.float32 if name in "if" else dtype) for name, t in x.items()}


TRITON = [name for name in mlstm_kernels.get_available_mlstm_kernels() if "triton" in name]


@pytest.mark.interpreter
@pytest.mark.parametrize("name", TRITON)
def test_mlstm_kernels(name: str, on: str) -> None:
    theirs = pytest.importorskip("mlstm_kernels.torch")
    # df of the original parallel kernel is a sum of rounded products over all steps, which is too inexact at 512.
    dtype, S, d = (torch.float32, 64, 16) if on == "cpu" else (torch.bfloat16, 256, 128)
    options: dict[str, Any] = {"autocast_kernel_dtype": dtype}
    if name.startswith("chunkwise"):
        options |= {"return_last_states": True, "chunk_size": 64}
    given = head_first(on, dtype, S, d)
    compare(mlstm_kernels.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), given, **options)
    solve_exactly(mlstm_kernels.get_mlstm_kernel(name), head_first(on, dtype, 2 * S, d), **options)


@pytest.mark.parametrize("normalize", [True, False])
def test_mlstm_kernels_sigmoid_gate_without_normalizer(normalize: bool, on: str) -> None:
    theirs = pytest.importorskip("mlstm_kernels.torch")
    name, dtype = "chunkwise--triton_xl_chunk_siging", torch.float32 if on == "cpu" else torch.bfloat16
    given = head_first(on, dtype, 128, 16)
    kernels = [m.get_mlstm_kernel(name) for m in (mlstm_kernels, theirs)]
    compare(*kernels, given, normalize=normalize, autocast_kernel_dtype=dtype)


@pytest.mark.interpreter
def test_mlstm_kernels_step(on: str) -> None:
    theirs = pytest.importorskip("mlstm_kernels.torch")
    torch.manual_seed(0)
    B, H, K, V = 2, 2, 32, 32
    shapes = {"q": (K,), "k": (K,), "v": (V,), "i": (1,), "f": (1,), "c": (K, V), "n": (K,), "m": (1,)}
    given = {name: torch.randn(B, H, *shape, device=on) for name, shape in shapes.items()}
    kernels = [m.get_mlstm_step_kernel("triton") for m in (mlstm_kernels, theirs)]
    compare(*kernels, given, backward=False, eps=1e-2)


def their_fla(module: str, name: str) -> Any:
    pytest.importorskip("fla")
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


FLA = {
    name: module for module in MODULES for name in importlib.import_module(f"tfla.integrations.fla.{module}").__all__
}
BY_CHANNEL = ("gla", "kda", "generalized_delta_rule", "rwkv7")  # modules whose gates are those of key channels


def fla_inputs(name: str, device: str) -> dict[str, Tensor]:
    """Return the tensors of a function of flash-linear-attention without defaults, and its gates."""
    torch.manual_seed(0)
    B, T, H, D = 2, 320, 4, 64
    arguments = inspect.signature(getattr(fla, name)).parameters
    unit = F.normalize(torch.randn(B, T, H, D, device=device), dim=-1)
    log_f = F.logsigmoid(torch.randn(B, T, H, *[D] * (FLA[name] in BY_CHANNEL), device=device) + 3)
    x = {argument: torch.randn(B, T, H, D, device=device) for argument in ("q", "r", "k", "v")}
    if "delta" in name or FLA[name] in ("kda", "comba", "rwkv7"):
        x["k"] = unit
    if "normalize" in arguments:
        x["q"], x["k"] = (F.elu(x[argument]) + 1 for argument in "qk")
    x |= {"p": unit / 2, "a": -unit, "b": unit * torch.rand_like(unit)}
    low = {argument: t.to(torch.bfloat16) for argument, t in x.items()}
    gates = dict.fromkeys(("g", "gk", "w"), log_f) | {"beta": torch.rand(B, T, H, device=device)}
    if name == "fused_recurrent_gated_delta_rule":
        del gates["gk"]
    found = {argument: t for argument, t in (low | gates).items() if argument in arguments}
    if name == "chunk_gated_delta_product":  # two writes in each step
        found |= {argument: found[argument][:, : T // 2] for argument in "qg"}
    return found


@pytest.mark.parametrize("name", FLA)
def test_inputs_of_flash_linear_attention_fit(name: str, device: str) -> None:
    options = {"num_householder": 2} if name == "chunk_gated_delta_product" else {}
    options |= {"layer_idx": 1, "num_layers": 8} if "lightning" in name else {}
    x = fla_inputs(name, device)
    o, _ = getattr(fla, name)(**x, **options)
    assert o.shape[2:] == x["v"].shape[2:]
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", FLA)
def test_flash_linear_attention(name: str, backward: bool, on: str) -> None:
    if on == "cpu":
        pytest.skip("theirs need a GPU")
    run = getattr(fla, name)
    arguments = inspect.signature(run).parameters
    requested = {
        "layer_idx": 1, "num_layers": 8, "normalize": True, "output_final_state": True, "output_attentions": True,
        "num_householder": 2,
    }  # fmt: skip
    options = {argument: value for argument, value in requested.items() if argument in arguments}
    compare(run, their_fla(FLA[name], name), fla_inputs(name, on), backward, **options)


def their_mamba(module: str, name: str) -> Any:
    try:
        return getattr(mamba_module(module), name)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


def mamba_inputs(device: str, batch: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    H, P, G, N = 8, 64, 2, 128
    shapes = {"x": (H, P), "B": (G, N), "C": (G, N), "z": (H, P), "dt": (H,)}
    x = {name: torch.randn(*batch, *shape, device=device) for name, shape in shapes.items()}
    x = {name: t if name == "dt" else t.to(dtype) for name, t in x.items()}
    x["dt"] = x["dt"] - 3
    return x | {"A": -torch.rand(H, device=device) - 0.5, "D": torch.randn(H, device=device),
                "dt_bias": torch.randn(H, device=device) / 4}  # fmt: skip


def test_mamba_scan(on: str) -> None:
    if on == "cpu":
        pytest.skip("theirs need a GPU")
    theirs = their_mamba("ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    given = mamba_inputs(on, (2, 512), torch.bfloat16)
    seq_idx = (torch.arange(512, device=on) >= 300).int().expand(2, 512).contiguous()
    options: dict[str, Any] = {"chunk_size": 256, "dt_softplus": True, "return_final_states": True, "seq_idx": seq_idx}
    compare(mamba.mamba_chunk_scan_combined, theirs, given, **options)


def test_mamba_step(on: str) -> None:
    if on == "cpu":
        pytest.skip("theirs need a GPU")
    theirs = their_mamba("ops.triton.selective_state_update", "selective_state_update")
    given = mamba_inputs(on, (4,), torch.float32)
    given["state"] = torch.randn(4, 8, 64, 128, device=on)

    def step(run: Callable[..., Tensor]) -> Callable[..., Any]:
        def call(state: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, **rest: Any) -> Any:
            expanded = {
                "dt": dt[..., None].expand(-1, -1, 64), "A": A[:, None, None].expand(-1, 64, 128),
                "D": D[:, None].expand(-1, 64), "dt_bias": dt_bias[:, None].expand(-1, 64),
            }  # fmt: skip
            return run(state, **expanded, **rest), state

        return call

    compare(step(mamba.selective_state_update), step(theirs), given, backward=False, dt_softplus=True)
