"""The tests of mlstm_kernels' module paths and wrappers against the package, and of the xlstm package with them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from heads_first import agree, flat, inputs, states

import tfla.integrations.mlstm_kernels as ours
from tfla.integrations.mlstm_kernels.torch import kernel_wrappers

theirs = pytest.importorskip("mlstm_kernels.torch", reason='pip install "tfla[baselines]"')
TABLES = ["mlstm_kernel", "mlstm_step_kernel", "mlstm_sequence_kernel"]
ANY_LENGTH = ["wrap_chunkwise__arbitrary_sequence_length", "wrap_chunkwise__arbitrary_sequence_length_with_padding"]


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "module", ["", ".backend_module", ".kernel_wrappers", ".chunkwise", ".parallel", ".recurrent"]
)  # fmt: skip
def test_module_paths(module: str) -> None:
    replacement, original = (
        importlib.import_module(f"{top}mlstm_kernels.torch{module}") for top in ("tfla.integrations.", "")
    )
    for name in replacement.__all__:
        assert hasattr(original, name), name
        if inspect.isfunction(getattr(replacement, name)):
            assert parameters(getattr(replacement, name)) == parameters(getattr(original, name)), name


@pytest.mark.parametrize("table", TABLES)
def test_every_kernel_is_where_theirs_is(table: str) -> None:
    for name in getattr(theirs, f"get_available_{table}s")():
        original = getattr(theirs, f"get_{table}")(name)
        module = original.__module__.removesuffix(".fwbw")
        found = getattr(importlib.import_module(f"tfla.integrations.{module}"), original.__name__)
        assert found is getattr(ours, f"get_{table}")(name)
        assert (
            getattr(importlib.import_module(f"tfla.integrations.{module.rpartition('.')[0]}"), original.__name__)
            is found
        )


@pytest.mark.parametrize("folder", ["chunkwise", "parallel"])
def test_registries(folder: str) -> None:
    replacement, original = (
        importlib.import_module(f"{top}mlstm_kernels.torch.{folder}") for top in ("tfla.integrations.", "")
    )
    assert list(replacement.registry) == list(original.registry)


class Recorder:
    """A kernel that records the number of steps and the chunk size of each call."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.calls: list[tuple[int, int | None]] = []

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append((arguments["q"].shape[2], arguments.get("chunk_size")))
        return self.kernel(**arguments)


@pytest.mark.parametrize(("S", "chunk_size"), [(1, 64), (37, 16), (64, 64), (70, 32), (129, 64), (12, 8)])
@pytest.mark.parametrize("wrapper", ANY_LENGTH)
def test_wrappers_of_their_kernels(wrapper: str, S: int, chunk_size: int) -> None:
    """The wrappers call the package's kernels as its own wrappers do, with the same results and gradients."""

    def run(module: Any, made: list[Recorder], **arguments: Any) -> Any:
        chunkwise = Recorder(theirs.get_mlstm_kernel("chunkwise--native_autograd"))
        sequence = Recorder(theirs.get_mlstm_sequence_kernel("native_sequence__native"))
        made += [chunkwise, sequence]
        step = theirs.get_mlstm_step_kernel("native")
        return getattr(module, wrapper)(chunkwise, sequence, step, **arguments, chunk_size=chunk_size, eps=1e-3)

    calls: list[list[Recorder]] = [[], []]
    modules = kernel_wrappers, importlib.import_module("mlstm_kernels.torch.kernel_wrappers")
    runs = [functools.partial(run, module, made) for module, made in zip(modules, calls, strict=True)]
    for initial in ({}, states()):
        agree(*runs, inputs(S) | initial)
    replacement, original = ([recorder.calls for recorder in made] for made in calls)
    assert replacement == original
    assert isinstance(runs[0](**inputs(S), return_last_states=False), torch.Tensor)


@pytest.mark.parametrize("name", ours.get_available_mlstm_kernels()[:5])
@pytest.mark.parametrize("wrapper", ANY_LENGTH)
def test_wrappers_of_our_kernels(wrapper: str, name: str) -> None:
    """The wrappers call this library's kernels once, without padding."""
    x = {name: t.detach() for name, t in inputs(37).items()}
    kernel, step = ours.get_mlstm_kernel(name), ours.get_mlstm_step_kernel("native")
    wrapped = functools.partial(getattr(kernel_wrappers, wrapper), kernel, Recorder(kernel), step)
    h, found = wrapped(**x, dtype_state=torch.bfloat16)
    expected, truth = kernel(**x, return_last_states=True)
    assert torch.equal(h, expected)
    assert len(found) == 3
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, truth, strict=False))
    if "siging" in name:
        assert not found[2].any()


def test_padding_for_training() -> None:
    modules = kernel_wrappers, importlib.import_module("mlstm_kernels.torch.kernel_wrappers")
    for name in ("chunkwise--native_custbw", "parallel--native_siging_custbw"):
        replacement, original = (
            functools.partial(m.wrap_chunkwise__pad_zeros, theirs.get_mlstm_kernel(name)) for m in modules
        )
        agree(replacement, original, inputs(37), chunk_size=16, autocast_kernel_dtype=torch.float32)
        own = functools.partial(kernel_wrappers.wrap_chunkwise__pad_zeros, ours.get_mlstm_kernel(name))
        agree(own, original, inputs(37), chunk_size=16, autocast_kernel_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"^normalise: got an argument"):
        own(**inputs(37), normalise=False)
    with pytest.raises(ValueError, match=r"^return_last_states: got True"):
        own(**inputs(37), return_last_states=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_padding_leaves_the_states(dtype: torch.dtype) -> None:
    """The max state may be far below -25, the gate of the padded steps in mlstm_kernels."""
    x = {name: t.detach().to(dtype) for name, t in inputs(33).items()}
    x["i"] -= 60
    x["f"] -= 8
    state = {name: t.detach() for name, t in states().items()}
    kernels = [m.get_mlstm_kernel("chunkwise--native_autograd") for m in (theirs, ours)]
    runs = [
        functools.partial(getattr(kernel_wrappers, ANY_LENGTH[1]), kernel, None, None, chunk_size=64)
        for kernel in kernels
    ]
    wide = {name: t.double() for name, t in (x | state).items()}
    for a, b in zip(*(flat(run(**wide, dtype_state=torch.float64)) for run in runs), strict=True):
        assert error(a, b) <= TOLERANCE[torch.float32]
    assert all(t.isfinite().all() for t in flat(runs[0](**x, dtype_state=dtype)))


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    kernels = (theirs.get_mlstm_kernel("chunkwise--native_autograd"),
               theirs.get_mlstm_sequence_kernel("native_sequence__native"), None)  # fmt: skip
    with caplog.at_level(logging.DEBUG, logger=kernel_wrappers.__name__):
        kernel_wrappers.wrap_chunkwise__arbitrary_sequence_length(*kernels, **inputs(37))
        assert not caplog.messages
        kernel_wrappers.wrap_chunkwise__arbitrary_sequence_length(*kernels, **inputs(37), enable_logging=True)
    assert caplog.messages == ["chunks of 32 for steps 0 to 32", "single steps for steps 32 to 37"]


@pytest.mark.parametrize("wrapper", kernel_wrappers.__all__)
def test_wrappers_refuse_what_does_not_fit(wrapper: str) -> None:
    x = {name: t.detach() for name, t in inputs(37).items()}
    needs = [theirs.get_mlstm_kernel("chunkwise--native_autograd"), None, None]
    run = functools.partial(getattr(kernel_wrappers, wrapper), *needs[: 3 if wrapper in ANY_LENGTH else 1])
    for name, bad in {"q": x["q"][0], "k": x["k"][..., 1:], "v": x["v"][:, 1:], "i": x["i"][..., None]}.items():
        with pytest.raises(ValueError, match=rf"^{name}: got shape"):
            run(**{**x, name: bad})
    with pytest.raises(ValueError, match=r"^q: got an empty sequence"):
        run(**{name: t[:, :, :0] for name, t in x.items()})
    for size in (0, -16, 16.0):
        with pytest.raises(ValueError, match=r"^chunk_size: got"):
            run(**x, chunk_size=size)


def large_model(monkeypatch: pytest.MonkeyPatch, backend_module: Any, **options: Any) -> Any:
    """Return a small xLSTMLarge of the xlstm package that uses this backend module, always with the same weights."""
    pytest.importorskip("xlstm", reason='pip install "tfla[baselines]"')
    monkeypatch.setitem(sys.modules, "mlstm_kernels.torch.backend_module", backend_module)
    for name in [name for name in sys.modules if name.startswith("xlstm.xlstm_large")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("xlstm.xlstm_large.model")
    assert module.mLSTMBackend is backend_module.mLSTMBackend
    for name in [name for name in sys.modules if name.startswith("xlstm.xlstm_large")]:
        del sys.modules[name]  # monkeypatch would put these back for other tests
    torch.manual_seed(0)
    config = module.xLSTMLargeConfig(
        embedding_dim=32, num_heads=2, num_blocks=2, vocab_size=40, step_kernel="native",
        sequence_kernel="native_sequence__native", chunkwise_kernel="chunkwise--native_autograd", chunk_size=16,
        return_last_states=True, **options,
    )  # fmt: skip
    return module.xLSTMLarge(config)


@pytest.mark.parametrize("weight_mode", ["single", "fused"])
def test_xlstm_large(monkeypatch: pytest.MonkeyPatch, weight_mode: str) -> None:
    """Logits, gradients, states and generated tokens are those of the model on mlstm_kernels."""
    original_module = importlib.import_module("mlstm_kernels.torch.backend_module")
    mine_module = importlib.import_module("tfla.integrations.mlstm_kernels.torch.backend_module")
    torch.manual_seed(1)
    tokens = torch.randint(40, (2, 32))
    results = []
    for module in (mine_module, original_module):
        options = {"weight_mode": weight_mode, "norm_reduction_force_float32": False}
        model = large_model(monkeypatch, module, **options).double()
        logits, state = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append([logits, *state[0], *state[1], *grads])
    for a, b in zip(*results, strict=True):
        assert error(a, b) <= TOLERANCE[torch.float64]

    generated = []
    for module in (mine_module, original_module):
        model = large_model(monkeypatch, module, weight_mode=weight_mode, mode="inference")
        made, state = model.generate(tokens[:, :21], max_length=8)
        made_later, state = model.generate(made[:, -1:], max_length=4, state=state)
        generated.append([made, made_later, *state[0], *state[1]])
    assert torch.equal(generated[0][0], generated[1][0])
    assert torch.equal(generated[0][1], generated[1][1])
    for a, b in zip(*generated, strict=True):
        assert error(a.float(), b.float()) <= TOLERANCE[torch.float32]


def test_xlstm_large_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/mlstm_kernels.md says, mlstm_kernels does not have to be installed."""
    replacement = importlib.import_module("tfla.integrations.mlstm_kernels.torch.backend_module")
    for name in [name for name in sys.modules if name.split(".")[0] == "mlstm_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlstm_kernels", None)
    assert large_model(monkeypatch, replacement)(torch.arange(16)[None])[0].shape == (1, 16, 40)
