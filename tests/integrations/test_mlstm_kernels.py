"""The tests of mlstm_kernels' interface against the package itself: signatures, results, gradients and errors."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch
from cases import TOLERANCE, error
from heads_first import Tensors, agree, flat, inputs, states
from torch._subclasses import FakeTensorMode

import tfla.integrations.mlstm_kernels as ours

theirs = pytest.importorskip("mlstm_kernels.torch", reason='pip install "tfla[baselines]"')
CPU_KERNELS = [name for name in ours.get_available_mlstm_kernels() if "triton" not in name]
TABLES = ["mlstm_kernel", "mlstm_step_kernel", "mlstm_sequence_kernel"]


@pytest.mark.parametrize("table", TABLES)
def test_names_and_signatures(table: str) -> None:
    available = table.replace("mlstm", "available_mlstm") + "s"
    names = getattr(theirs, f"get_{available}")()
    assert getattr(ours, f"get_{available}")() == names
    for name in names:
        parameters = [
            [
                (p.name, p.kind, p.default)
                for p in inspect.signature(getattr(m, f"get_{table}")(name)).parameters.values()
            ]
            for m in (ours, theirs)
        ]
        assert parameters[0] == parameters[1], name
    with pytest.raises(ValueError, match=r"^name: got 'chunkwise--none', allowed are"):
        getattr(ours, f"get_{table}")("chunkwise--none")


def test_types_of_options_are_theirs() -> None:
    original = importlib.import_module("mlstm_kernels.torch.backend_module")
    for name in ("ChunkwiseKernelType", "SequenceKernelType", "StepKernelType", "DtypeType", "BackendModeType"):
        assert getattr(ours, name) == getattr(original, name), name
    assert get_type_hints(ours.mLSTMBackendConfig) == get_type_hints(original.mLSTMBackendConfig)
    assert sorted(get_args(ours.ChunkwiseKernelType)) == sorted(ours.get_available_mlstm_kernels())
    assert list(get_args(ours.SequenceKernelType)) == ours.get_available_mlstm_sequence_kernels()
    assert list(get_args(ours.StepKernelType)) == ours.get_available_mlstm_step_kernels()


def test_kernels_are_attributes_of_the_backend() -> None:
    options = {"chunkwise_kernel": "chunkwise--native_custbw", "return_last_states": False}
    backend, original = backends(**options)
    for attribute in ("chunkwise_kernel_fn", "sequence_kernel_fn", "step_kernel_fn"):
        assert callable(getattr(original, attribute))
    assert backend.chunkwise_kernel_fn is ours.get_mlstm_kernel(options["chunkwise_kernel"])
    assert backend.sequence_kernel_fn is ours.get_mlstm_sequence_kernel("native_sequence__native")
    assert backend.step_kernel_fn is ours.get_mlstm_step_kernel("native")
    # The kernels of the two libraries are interchangeable.
    x = inputs(37)
    expected, *state = flat(backend(**x, mode="inference"))
    backend.chunkwise_kernel_fn = original.chunkwise_kernel_fn
    for found, truth in zip(flat(backend(**x, mode="inference")), [expected, *state], strict=True):
        assert error(found, truth) <= TOLERANCE[torch.float32]


def test_configuration_is_theirs() -> None:
    from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

    assert vars(ours.mLSTMBackendConfig()) == vars(mLSTMBackendConfig())
    assert list(inspect.signature(ours.mLSTMBackend.forward).parameters) == list(
        inspect.signature(mLSTMBackend.forward).parameters
    )
    assert repr(ours.mLSTMBackend(ours.mLSTMBackendConfig())) == repr(mLSTMBackend(mLSTMBackendConfig()))


@pytest.mark.parametrize("name", ours.get_available_mlstm_kernels())
def test_outputs_have_heads_first_in_memory(name: str) -> None:
    x = inputs()
    last = {} if name.startswith("parallel") else {"return_last_states": True}
    found = flat(ours.get_mlstm_kernel(name)(**x, **last))
    assert all(t.is_contiguous() for t in found)
    if name in CPU_KERNELS:
        assert found[0].stride() == theirs.get_mlstm_kernel(name)(**x).stride()
    found[0].view(*found[0].shape[:2], -1).sum().backward()


@pytest.mark.parametrize("S", [1, 37])
@pytest.mark.parametrize("mode", ["train", "train_with_padding", "inference"])
def test_outputs_of_the_backend_have_heads_first_in_memory(mode: str, S: int) -> None:
    config = ours.mLSTMBackendConfig(mode=mode, return_last_states=mode == "train")
    assert all(t.is_contiguous() for t in flat(ours.mLSTMBackend(config)(**inputs(S))))


@pytest.mark.parametrize("table", TABLES)
def test_no_argument_is_swallowed(table: str) -> None:
    """Kernels with ``**kwargs`` accept the tuning arguments of all kernels, and no others."""
    chunkwise = ours.get_mlstm_kernel("chunkwise--triton_xl_chunk")
    tuning = list(inspect.signature(chunkwise).parameters)[10:]
    assert tuning[0] == "chunk_size"
    given = inputs() if table != "mlstm_step_kernel" else a_step(torch.float32, torch.float32)
    for name in getattr(ours, f"get_available_{table}s")():
        kernel = getattr(ours, f"get_{table}")(name)
        if "kwargs" not in inspect.signature(kernel).parameters:
            continue
        expected = flat(kernel(**given))
        values = dict.fromkeys(tuning, 1) | {"autocast_kernel_dtype": torch.bfloat16}
        for found, truth in zip(flat(kernel(**given, **values)), expected, strict=True):
            assert torch.equal(found, truth)
        for unknown in ("chunk_sise", "return_last_state", *([] if "siging" in name else ["normalize"])):
            with pytest.raises(
                TypeError, match=rf"^{unknown}: got an argument that \w+ does not take, .* q, k, v, i, f,"
            ):
                kernel(**given, **{unknown: True})


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize(("i_mean", "eps"), [(0.0, 1e-6), (0.0, 0.0), (3.0, 0.3)], ids=str)
def test_sequences(name: str, i_mean: float, eps: float) -> None:
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), inputs(i_mean=i_mean), eps=eps)


@pytest.mark.parametrize("name", [name for name in CPU_KERNELS if name.endswith("_autograd")])
def test_exact_to_float64(name: str) -> None:
    """The package computes these gradients by autograd through the whole function, with eps and max state."""
    x = inputs(dtype=torch.float64, i_mean=1.0)
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), x, eps=0.1)


@pytest.mark.parametrize("eps", [1e-6, 0.0, 0.3])
def test_states_pass_through_with_their_gradients(eps: float) -> None:
    given = inputs() | states()
    options = {"return_last_states": True, "eps": eps}
    name = "chunkwise--native_autograd"
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), given, **options)
    sequences = [m.get_mlstm_sequence_kernel("native_sequence__native") for m in (ours, theirs)]
    agree(*sequences, inputs(13) | states(), **options)


def test_states_of_the_papers_gradients() -> None:
    """The package's backward of these kernels has no gradient of m, and drops cotangents of the last states."""
    given = inputs() | states()
    given["m_initial"] = given["m_initial"].detach()
    given["n_initial"] = given["n_initial"].detach()
    name = "chunkwise--native_custbw"
    agree(
        ours.get_mlstm_kernel(name),
        theirs.get_mlstm_kernel(name),
        given,
        cotangents_of_states=False,
        return_last_states=True,
    )


@pytest.mark.parametrize("given", [("c_initial",), ("c_initial", "n_initial"), ("m_initial",)], ids=str)
def test_missing_states_are_zero(given: tuple[str, ...]) -> None:
    x = inputs() | {name: t for name, t in states().items() if name in given}
    name = "chunkwise--native_autograd"
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), x, cotangents_of_states=False, eps=0.3)


def a_step(dtype: torch.dtype, state_dtype: torch.dtype) -> Tensors:
    one = {name: t.detach().to(dtype) for name, t in inputs(1).items()}
    one = {name: t[:, :, 0] if name in "qkv" else t for name, t in one.items()}
    return one | {name[0]: t.detach().to(state_dtype) for name, t in states().items()}


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_gradients_of_steps(eps: float) -> None:
    """Gradients of the new states are included, and that of the max state, which the package has by autograd."""
    one = {name: t.requires_grad_() for name, t in a_step(torch.float64, torch.float64).items()}
    kernels = [m.get_mlstm_step_kernel("native") for m in (ours, theirs)]
    agree(*kernels, one, eps=eps, dtype_state=torch.float64)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps(dtype: torch.dtype, state_dtype: torch.dtype, eps: float) -> None:
    one = a_step(dtype, state_dtype)
    before = {name: t.clone() for name, t in one.items()}
    found, expected = (
        flat(m.get_mlstm_step_kernel("native")(**one, eps=eps, dtype_state=state_dtype)) for m in (ours, theirs)
    )
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    wide = {name: t.double() for name, t in one.items()}  # the package computes in the dtype of the state
    truth = flat(theirs.get_mlstm_step_kernel("native")(**wide, eps=eps, dtype_state=torch.float64))
    for ours_, theirs_, exact in zip(found, expected, truth, strict=True):
        assert error(ours_, exact) <= TOLERANCE[ours_.dtype]
        assert error(theirs_, exact) <= max(TOLERANCE[dtype], TOLERANCE[state_dtype])
    assert all(torch.equal(one[name], t) for name, t in before.items())


def backends(**options: Any) -> list[Any]:
    from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

    return [
        ours.mLSTMBackend(ours.mLSTMBackendConfig(**options)), mLSTMBackend(mLSTMBackendConfig(**options)),
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", ["chunkwise--native_autograd", "parallel--native_custbw"])
def test_backend_trains(kernel: str) -> None:
    chunkwise = kernel.startswith("chunkwise")
    agree(*backends(chunkwise_kernel=kernel, return_last_states=chunkwise), inputs())
    agree(*backends(chunkwise_kernel=kernel, mode="train_with_padding", return_last_states=False), inputs(37))
    agree(*backends(chunkwise_kernel=kernel, return_last_states=False), inputs(), return_last_states=False)


def test_padding_keeps_the_eps_of_the_config() -> None:
    """The wrapper of the package passes its own default to the kernel."""
    options = {"mode": "train_with_padding", "return_last_states": False}
    own, package = backends(**options, eps=0.3)
    plain = backends(return_last_states=False, eps=0.3)[0]
    x = inputs(64)
    agree(own, plain, x)
    agree(backends(**options)[0], package, x)


@pytest.mark.parametrize("normalize", [True, False])
def test_backend_trains_the_sigmoid_gate(normalize: bool) -> None:
    options = {"chunkwise_kernel": "parallel--native_siging_custbw", "normalize_siging": normalize}
    agree(*backends(**options, return_last_states=False), inputs(37))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("S", [1, 37, 64, 69])
def test_backend_infers(S: int, state_dtype: str) -> None:
    dtype = getattr(torch, state_dtype)
    x = {name: t.detach() for name, t in inputs(S, dtype=dtype).items()}
    state = {name: t.detach() for name, t in states(dtype).items()}
    found, expected = (
        flat(m(**x, **state)) for m in backends(mode="inference", inference_state_dtype=state_dtype, eps=1e-3)
    )
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    exact = flat(theirs.get_mlstm_sequence_kernel("native_sequence__native")(
        **{name: t.double() for name, t in (x | state).items()}, return_last_states=True, eps=1e-3,
        dtype_state=torch.float64,
    ))  # fmt: skip
    for ours_, truth in zip(found, exact, strict=True):  # in bfloat16 the package rounds more than once
        assert error(ours_, truth) <= TOLERANCE[dtype]


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gate_steps_continue_sequences(normalize: bool) -> None:
    """In the package they do not, because its steps have the exponential gate."""
    config = ours.mLSTMBackendConfig(
        chunkwise_kernel="chunkwise--triton_xl_chunk_siging", mode="inference", normalize_siging=normalize, eps=1e-2
    )
    backend = ours.mLSTMBackend(config)
    x = {name: t.detach() for name, t in inputs(9).items()}
    whole, last = backend(**x)
    h, state = backend(**{name: t[:, :, :7] for name, t in x.items()})
    for t in (7, 8):
        initial = dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
        h, state = backend(**{name: x_[:, :, t : t + 1] for name, x_ in x.items()}, **initial)
    assert error(h, whole[:, :, -1:]) <= TOLERANCE[torch.float32]
    assert error(state[0], last[0]) <= TOLERANCE[torch.float32]
    if normalize:
        assert error(state[1], last[1]) <= TOLERANCE[torch.float32]


def test_extreme_gates_stay_finite() -> None:
    x = inputs()
    with torch.no_grad():
        x["i"][:, :, ::3], x["i"][:, :, 1::3] = -1e4, 200.0
        x["f"][:, :, ::5] = -1e4
    for name in ours.get_available_mlstm_kernels():
        h = ours.get_mlstm_kernel(name)(**x)
        assert all(torch.isfinite(t).all() for t in (h, *torch.autograd.grad(h.sum(), list(x.values())))), name


@pytest.mark.parametrize("name", ["chunkwise--native_autograd", "chunkwise--triton_xl_chunk_siging"])
def test_max_states_without_float64(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some devices lack float64; over 700 steps sums of gates are large."""
    given = {name: t.detach() for name, t in (inputs(700) | states()).items()}
    given["f"] -= 3
    kernel = functools.partial(ours.get_mlstm_kernel(name), return_last_states=True, eps=0.1)
    exact = flat(kernel(**{name: t.double() for name, t in given.items()}))
    monkeypatch.setattr("tfla.integrations.mlstm_kernels.denominator.DEVICES_WITHOUT_FLOAT64", ("cpu",))
    for found, truth in zip(flat(kernel(**given)), exact, strict=True):
        assert found.dtype == torch.float32
        assert error(found, truth) <= TOLERANCE[torch.float32]


def test_under_autocast() -> None:
    x = inputs()
    kernel = ours.get_mlstm_kernel("chunkwise--triton_limit_chunk")
    with torch.autocast("cpu", torch.bfloat16):
        half = kernel(**x, autocast_kernel_dtype=torch.float16)
        assert ours.get_mlstm_kernel("chunkwise--native_autograd")(**x).dtype == torch.bfloat16
    assert half.dtype == torch.float16
    assert error(half, kernel(**x)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", ours.get_available_mlstm_kernels())
def test_without_numbers(name: str) -> None:
    """Forward and backward run on meta tensors and on fake tensors."""
    x = inputs(13)
    h = ours.get_mlstm_kernel(name)(**{name: t.to("meta") for name, t in x.items()})
    assert (h.device.type, h.shape) == ("meta", x["v"].shape)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in x.items()}
        h = ours.get_mlstm_kernel(name)(**fake)
        grads = torch.autograd.grad(h.sum(), list(fake.values()))
    assert h.shape == x["v"].shape
    assert [g.shape for g in grads] == [t.shape for t in x.values()]


def test_compiles_whole() -> None:
    x = inputs(16)
    backend = ours.mLSTMBackend(ours.mLSTMBackendConfig(return_last_states=False))
    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    h, expected = compiled(**x), backend(**x)
    assert torch.equal(h, expected)
    cotangent = torch.randn_like(h)
    pairs = [torch.autograd.grad(out, list(x.values()), cotangent) for out in (h, expected)]
    assert all(error(a, b) <= TOLERANCE[torch.float32] for a, b in zip(*pairs, strict=True))
    for kernel, S in (("chunkwise--native_autograd", 16), ("chunkwise--triton_xl_chunk_siging", 1)):
        infers = ours.mLSTMBackend(ours.mLSTMBackendConfig(chunkwise_kernel=kernel, mode="inference"))
        x = {name: t.detach() for name, t in inputs(S).items()}
        found, expected = torch.compile(infers, fullgraph=True, backend="aot_eager")(**x), infers(**x)
        assert all(torch.equal(a, b) for a, b in zip(flat(found), flat(expected), strict=True))


TRANSFORMED_KERNELS = ["chunkwise--native_autograd", "chunkwise--native_custbw", "parallel--native_siging_autograd"]


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("name", TRANSFORMED_KERNELS)
def test_transforms_of_torch_func(name: str, eps: float) -> None:
    """grad, vjp and vmap are compared with autograd, and jvp by <jvp(t), c> = <t, vjp(c)>."""
    x = inputs(13, dtype=torch.float64)
    if name.startswith("chunkwise"):
        x |= states(torch.float64)
    leaves = list(x.values())

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return ours.get_mlstm_kernel(name)(**dict(zip(x, tensors, strict=True)), eps=eps)

    expected = run(*leaves)
    cotangent = torch.randn_like(expected)
    tangents = tuple(torch.randn_like(t) for t in leaves)
    grads = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True, materialize_grads=True)
    plain = tuple(t.detach() for t in leaves)
    every = tuple(range(len(leaves)))
    allowed = TOLERANCE[torch.float64]
    h, pull_back = torch.func.vjp(run, *plain)
    by_grad = torch.func.grad(lambda *tensors: (run(*tensors) * cotangent).sum(), argnums=every)(*plain)
    for found in (pull_back(cotangent), by_grad):
        assert all(error(a, b) <= allowed for a, b in zip(found, grads, strict=True))
    assert error(h, expected) <= allowed

    h, tangent = torch.func.jvp(run, plain, tangents)
    assert error(h, expected) <= allowed
    inner = sum((t * g).sum() for t, g in zip(tangents, grads, strict=True))
    assert abs((tangent * cotangent).sum() - inner) <= allowed * tangent.norm() * cotangent.norm()
    assert tangent.norm() > 0

    many = tuple(torch.stack([t, 0.5 * t]) for t in plain)
    found = torch.vmap(run)(*many)
    assert error(found, torch.stack([run(*(t[n] for t in many)) for n in range(2)])) <= allowed


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("name", ["chunkwise--native_autograd", "parallel--native_siging_autograd"])
def test_second_derivatives(name: str, eps: float) -> None:
    """The package has second derivatives in kernels by autograd. One tensor may also be given as two arguments."""
    x = inputs(64, dtype=torch.float64)
    if name.startswith("chunkwise"):
        x |= states(torch.float64)
    weights = {t: torch.randn_like(t) for t in x.values()}
    cotangent = torch.randn(2, 3, 64, 6, dtype=torch.float64)

    def second(module: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(dict.fromkeys(given.values()))
        h = module.get_mlstm_kernel(name)(**given, eps=eps)
        grads = torch.autograd.grad(h, leaves, cotangent, create_graph=True)
        value = sum((g.sin() * weights[t]).sum() for t, g in zip(leaves, grads, strict=True))
        return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))

    for given in (x, {**x, "k": x["q"]}):
        for a, b in zip(second(ours, given), second(theirs, given), strict=True):
            assert error(a, b) <= TOLERANCE[torch.float64]


def test_refuses_what_does_not_fit() -> None:
    x = {name: t.detach() for name, t in inputs().items()}
    state = {name: t.detach() for name, t in states().items()}
    chunkwise = ours.get_mlstm_kernel("chunkwise--native_custbw")
    bad = {"q": x["q"][0], "k": x["k"][..., 1:], "v": x["v"][:, 1:], "i": x["i"][..., None], "f": x["f"][:, :, 1:]}
    for name, t in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            chunkwise(**{**x, name: t})
    for name, t in state.items():
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            chunkwise(**x, **{**state, name: t[1:]})
    one = {name: t.detach() for name, t in a_step(torch.float32, torch.float32).items()}
    for name in ("c", "n", "m"):
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            ours.get_mlstm_step_kernel("native")(**{**one, name: one[name][1:]})
    with pytest.raises(ValueError, match=r"return_last_states, c_initial"):
        ours.get_mlstm_kernel("parallel--native_custbw")(**x, return_last_states=True)
    with pytest.raises(ValueError, match=r"^c_initial, n_initial, m_initial: got some"):
        ours.get_mlstm_sequence_kernel("native_sequence__native")(**x, c_initial=state["c_initial"])
    for option, value in {
        "mode": "test", "chunkwise_kernel": "native", "step_kernel": "fast", "sequence_kernel": "native",
        "autocast_kernel_dtype": "float64", "inference_state_dtype": "int8",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{option}: got '{value}', allowed are"):
            ours.mLSTMBackendConfig(**{option: value})
    for option, value in {"return_last_states": "False", "normalize_siging": 2, "eps": "1e-6"}.items():
        with pytest.raises(TypeError, match=f"^{option}: got "):
            ours.mLSTMBackendConfig(**{option: value})
    for refused in ({"chunkwise_kernel": "parallel--native_custbw"}, {"mode": "train_with_padding"}):
        with pytest.raises(ValueError, match=r"^return_last_states: got True"):
            ours.mLSTMBackendConfig(**refused)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("i", [-80.0, -89.0, -300.0])
def test_steps_after_closed_input_gates(i: float, gradients: bool) -> None:
    """exp(-m) overflows in float32, so that h is 0, as in the package; it was NaN with an eps above 0."""
    x = a_step(torch.float32, torch.float32)
    x |= {"i": torch.full_like(x["i"], i), "m": torch.full_like(x["m"], -1e4), "c": x["c"] * 0, "n": x["n"] * 0}
    x = {name: t.detach().requires_grad_(gradients) for name, t in x.items()}
    found, expected = (flat(m.get_mlstm_step_kernel("native")(**x)) for m in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert torch.allclose(a, b, rtol=1e-5)
    if gradients:
        assert all(g.isfinite().all() for g in torch.autograd.grad(found[0].sum(), [x[n] for n in "qkvif"]))


WRONG_TENSORS = (None, "x", 3, [1.0], torch.ones(2, dtype=torch.long))
WRONG_EPSILONS = ("1e-6", None, [1e-6], True, torch.ones(2), float("nan"), float("inf"), -1e-6)
WRONG_DTYPES = ("float32", torch.int32, 4)


@pytest.mark.parametrize(
    "name",
    [
        "chunkwise--native_autograd",
        "chunkwise--triton_xl_chunk_siging",
        "parallel--native_custbw",
        "native_sequence__native",
        "native",
    ],
)
def test_every_wrong_argument_is_named(name: str) -> None:
    kernels = {n: k for table in TABLES for n in getattr(ours, f"get_available_{table}s")()
               for k in [getattr(ours, f"get_{table}")(n)]}  # fmt: skip
    kernel, given = kernels[name], inputs(9) if name != "native" else a_step(torch.float32, torch.float32)
    given = {name: t.detach() for name, t in given.items()}
    if name.startswith("chunkwise") or "sequence" in name:
        given |= {name: t.detach() for name, t in states().items()}
    wrong: list[tuple[str, Any]] = []
    for argument in inspect.signature(kernel).parameters:
        if argument in given:
            wrong += [(argument, value) for value in WRONG_TENSORS if value is not None or "_initial" not in argument]
        elif argument == "eps":
            wrong += [(argument, value) for value in WRONG_EPSILONS]
        elif argument in ("return_last_states", "normalize"):
            wrong += [(argument, value) for value in ("False", 2, [True], torch.ones(2))]
        elif argument in ("dtype_state", "autocast_kernel_dtype"):
            wrong += [(argument, value) for value in WRONG_DTYPES]
    assert len(wrong) > 30
    for argument, value in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}: got "):
            kernel(**{**given, argument: value})


@pytest.mark.parametrize("eps", [0, 1e-6])
def test_dtypes_that_differ_and_empty_sequences(eps: float) -> None:
    x = {name: t.detach() for name, t in inputs(9).items()}
    kernel = ours.get_mlstm_kernel("chunkwise--native_autograd")
    for name in ("k", "v"):
        with pytest.raises(TypeError, match=rf"^{name}: got dtype torch.bfloat16, expected that of q"):
            kernel(**{**x, name: x[name].bfloat16()}, eps=eps)
    for empty in ({name: t[:, :, :0] for name, t in x.items()}, {**x, "v": x["v"][..., :0]}):
        with pytest.raises(ValueError, match=r"^v: got shape .*, expected no empty dimension"):
            kernel(**empty, eps=eps)
