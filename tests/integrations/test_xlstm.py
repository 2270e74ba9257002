"""Models of the xlstm package, and models with mlstm_kernels' backend module, compute the same with tfla."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from torch import Tensor, nn

from tfla.integrations import xlstm as ours
from tfla.integrations.mlstm_kernels.torch.backend_module import mLSTMBackend as OurBackend
from tfla.integrations.xlstm import accelerate, restore
from tfla.nn import reverse_sequences

xlstm = pytest.importorskip("xlstm", reason='pip install "tfla[baselines]"')
backend_module = pytest.importorskip("mlstm_kernels.torch.backend_module", reason='pip install "tfla[baselines]"')
functions = importlib.import_module("xlstm.blocks.mlstm.backends")
LARGE_KERNELS = ["chunkwise--native_autograd", "chunkwise--native_custbw"]  # xLSTMLarge takes no parallel ones
KERNELS = [*LARGE_KERNELS, "parallel--native_stablef_autograd", "parallel--native_siging_autograd"]


def randomize(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Add random numbers to the weights, so that gates depend on the input."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype)


def mlstm_layer(dtype: torch.dtype = torch.float64, context_length: int = 40, width: int = 16) -> nn.Module:
    config = xlstm.mLSTMLayerConfig(embedding_dim=width, num_heads=2, context_length=context_length)
    return randomize(xlstm.mLSTMLayer(config), dtype)


def language_model() -> nn.Module:
    """Return a model with blocks of mLSTM and one of sLSTM."""
    stack = {
        "mlstm_block": xlstm.mLSTMBlockConfig(xlstm.mLSTMLayerConfig(num_heads=2)),
        "slstm_block": xlstm.sLSTMBlockConfig(xlstm.sLSTMLayerConfig(backend="vanilla", num_heads=2)),
        "slstm_at": [1],
    }
    config = xlstm.xLSTMLMModelConfig(vocab_size=30, embedding_dim=16, num_blocks=3, context_length=40, **stack)
    return randomize(xlstm.xLSTMLMModel(config))


def large(**options: Any) -> nn.Module:
    module = importlib.import_module("xlstm.xlstm_large.model")
    options = {"chunkwise_kernel": KERNELS[0], "return_last_states": True} | options
    sizes = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 2, "vocab_size": 40}
    config = module.xLSTMLargeConfig(
        sequence_kernel="native_sequence__native", step_kernel="native", chunk_size=16,
        norm_reduction_force_float32=False, **sizes | options,
    )  # fmt: skip
    return randomize(module.xLSTMLarge(config))


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors in what a model returns."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in (result.values() if isinstance(result, dict) else result or ()) for t in tensors(part)]


def results(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return what the model returns, and the gradients of its parameters from random cotangents."""
    found = tensors(model(*inputs))
    torch.manual_seed(2)
    weights = [torch.randn(t.shape).to(t) for t in found[:1]]  # the same for every dtype and device
    parameters = list(model.parameters())
    return [*found, *torch.autograd.grad(found[:1], parameters, weights, allow_unused=True, materialize_grads=True)]


def check_same(found: list[Tensor], expected: list[Tensor], tolerance: float | None = None) -> None:
    assert len(found) == len(expected)
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), at
        assert error(a, b) <= (TOLERANCE[b.dtype] if tolerance is None else tolerance), at


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("S", [1, 17, 40])
def test_layer(S: int, dtype: torch.dtype) -> None:
    layer = mlstm_layer(dtype)
    x = torch.randn(2, S, 16, dtype=dtype)
    expected = results(layer, x)
    before = set(layer.state_dict())
    assert accelerate(layer) is layer
    assert set(layer.state_dict()) == before
    check_same(results(layer, x), expected)
    assert restore(layer) is layer
    assert all(torch.equal(a, b) for a, b in zip(results(layer, x), expected, strict=True))


@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_layer_in_half_precision(mode: str) -> None:
    """The error is at most 1.5 times that of the package, beside its own layer in float64."""
    layer, x = mlstm_layer(), torch.randn(2, 40, 16, dtype=torch.float64)
    exact = layer(x)
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    layer.to(dtype)
    found = []
    for change in (restore, accelerate):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = change(layer)(x.to(dtype))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        found.append(error(y, exact))
    assert found[1] <= 1.5 * found[0] < 0.1


ON_DEVICES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {  # heads of the GPUs' kernels
    "layer float32": (lambda: mlstm_layer(context_length=96, width=64), (2, 96, 64), torch.float32),
    "layer bfloat16": (lambda: mlstm_layer(context_length=96, width=64), (2, 96, 64), torch.bfloat16),
    "large float32": (lambda: large(embedding_dim=256), (2, 96), torch.float32),
}


@pytest.mark.parametrize("case", ON_DEVICES)
def test_every_device_computes_what_the_cpu_does_in_float64(
    device: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of outputs and gradients are within tolerance, or at most ten times those of the package there."""
    make, shape, dtype = ON_DEVICES[case]
    model, generator = make().to(dtype), torch.Generator().manual_seed(5)
    if len(shape) == 2:
        x = exact = torch.randint(40, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator).to(dtype)
        exact = x.double()
    truth = by_module(copy.deepcopy(model).double(), exact)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the layer's convolution
    model.to(device)
    theirs, found = by_module(model, x.to(device)), by_module(accelerate(model), x.to(device))
    bound = 5 * TOLERANCE[dtype]
    assert error(found["y"].cpu(), truth["y"]) <= bound
    for name, expected in truth.items():
        assert (found[name].device.type, found[name].dtype) == (device, dtype)
        assert error(found[name].cpu(), expected) <= max(bound, 10 * error(theirs[name].cpu(), expected)), name


def by_module(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients, those of a module's parameters together, as that of a bias nearly cancels.

    States are left out: the kernels of a GPU may choose another scale m for them.
    """
    names = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
    found = results(model, x)
    parts: dict[str, list[Tensor]] = {"y": found[:1]}
    for name, gradient in zip(names, found[-len(names) :], strict=True):
        parts.setdefault(name, []).append(gradient.flatten())
    return {name: torch.cat(each) for name, each in parts.items()}


def run_steps(model: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return the outputs of single steps of a layer, whose state is a dict of its arguments, or of a model."""
    outputs = []
    for t in range(x.shape[1]):
        one = x[:, t : t + 1]
        y, state = model.step(one, **state) if isinstance(model, xlstm.mLSTMLayer) else model.step(one, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_of_a_layer(dtype: torch.dtype) -> None:
    """Outputs and all states; a state of either path goes on in the other."""
    layer = mlstm_layer(dtype)
    x = torch.randn(2, 12, 16, dtype=dtype)
    with torch.no_grad():
        expected = tensors(run_steps(layer, x, {}))
        first, middle = run_steps(layer, x[:, :5], {})
        accelerate(layer)
        check_same(tensors(run_steps(layer, x, {})), expected)
        second, middle = run_steps(layer, x[:, 5:8], middle)
        third, last = run_steps(restore(layer), x[:, 8:], middle)
    check_same([torch.cat([first, second, third], 1), *tensors(last)], expected)


def test_gradients_of_steps() -> None:
    """The convolution of the package's layer writes in place, so that these are steps of the cell alone."""
    cell: Any = mlstm_layer().mlstm_cell
    given = torch.randn(3, 2, 4, 64, dtype=torch.float64, requires_grad=True)

    def run() -> list[Tensor]:
        loss, state = torch.zeros((), dtype=torch.float64), None
        for t in range(4):
            h, state = cell.step(*(given[n, :, t : t + 1] * 1.0 for n in range(3)), state)  # it writes into them
            loss = loss + (h * torch.linspace(-1, 2, 64)).sum()
        leaves = [given, *cell.parameters()]
        return [*tensors(state), *torch.autograd.grad(loss + sum(t.square().sum() for t in tensors(state)), leaves)]

    expected = run()
    accelerate(cell)
    check_same(run(), expected)


def test_longer_than_the_context() -> None:
    """The package's mask has context_length rows; tfla needs none."""
    x = torch.randn(1, 90, 16, dtype=torch.float64)
    layer, longer = mlstm_layer(), mlstm_layer(context_length=90)
    longer.load_state_dict(layer.state_dict())
    check_same([accelerate(layer)(x)], [longer(x)])


def test_language_model_with_slstm_blocks() -> None:
    model: Any = language_model()
    tokens = torch.randint(30, (2, 21))
    expected, stepped = results(model, tokens), run_steps(model, tokens, {})
    accelerate(model)
    check_same(results(model, tokens), expected)
    found = run_steps(model, tokens, {})
    check_same([found[0], *tensors(found[1])], [stepped[0], *tensors(stepped[1])])


@pytest.mark.parametrize("weight_mode", ["single", "fused"])
@pytest.mark.parametrize("kernel", LARGE_KERNELS)
def test_xlstm_large(kernel: str, weight_mode: str) -> None:
    """Logits, states and gradients are those of the kernel that the config names."""
    model = large(chunkwise_kernel=kernel, weight_mode=weight_mode)
    tokens = torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = results(model, tokens)
    assert len(tensors(model(tokens))) == 7
    accelerate(model)
    check_same(results(model, tokens), expected)
    assert model(tokens[:, :19])[0].isfinite().all()  # a length that the package's kernels refuse
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(results(model, tokens), expected, strict=True))


def test_generation_of_xlstm_large(device: str) -> None:
    tokens = torch.randint(40, (2, 21), generator=torch.Generator().manual_seed(1)).to(device)
    model: Any = large(mode="inference").float().to(device)
    found = []
    for change in (lambda m: m, accelerate):
        made, state = change(model).generate(tokens, max_length=8)
        later, state = model.generate(made[:, -1:], max_length=4, state=state)
        found.append([made, later, *tensors(state)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    if device == "cpu":
        check_same(found[1][2:], found[0][2:])
    for at in range(2, len(found[0]), 3):  # C, n and m of each block; kernels of a GPU may choose another m
        (c, n, m), truth = found[1][at : at + 3], found[0][at : at + 3]
        shift = torch.exp(m - truth[2])
        check_same([c * shift[..., None], n * shift], truth[:2], 5 * TOLERANCE[torch.float32])


def test_a_backend_goes_on_reading_its_config() -> None:
    model: Any = large()
    accelerate(model)
    tokens = torch.randint(40, (2, 16))
    backends = [m for m in model.modules() if isinstance(m, backend_module.mLSTMBackend)]
    assert len(backends) == 2
    assert tensors(model(tokens)[1])
    for backend in backends:
        backend.config.return_last_states = False
        q = torch.randn(1, 2, 16, 8)
        h = backend(q, q, q, q[..., 0], q[..., 0])
        assert isinstance(h, Tensor)
        backend.config.mode = "inference"
        assert len(backend(q, q, q, q[..., 0], q[..., 0])[1]) == 3


def test_copies_hooks_and_a_backend_alone() -> None:
    backend = backend_module.mLSTMBackend(backend_module.mLSTMBackendConfig(eps=0.1))
    recorded: list[Any] = []
    backend.register_forward_hook(lambda *args: recorded.append(args))
    q = torch.randn(1, 2, 64, 8)
    given = (q, q, q, q[..., 0], q[..., 1])
    expected = tensors(backend(*given))
    accelerate(backend)
    assert isinstance(backend.forward.__self__, OurBackend)
    check_same(tensors(backend(*given)), expected)
    assert len(recorded) == 2
    other = copy.deepcopy(backend)
    other.config.eps = 0.5
    assert error(other(*given)[0], expected[0]) > 1e-2
    check_same(tensors(backend(*given)), expected)
    restore(other)
    assert "forward" not in vars(other)
    assert "forward" in vars(accelerate(accelerate(backend)))
    for layer in (accelerate(mlstm_layer()), mlstm_layer()):
        x = torch.randn(1, 5, 16, dtype=torch.float64)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_compiled() -> None:
    for model, given in (
        (mlstm_layer(torch.float32), torch.randn(2, 12, 16)),
        (large().float(), torch.randint(40, (2, 12))),
    ):
        accelerate(model)
        expected = results(model, given)
        check_same(results(torch.compile(model, fullgraph=True, backend="aot_eager"), given), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_backends_with_every_kind_of_kernel(kernel: str) -> None:
    layer = randomize(ByteLayer(kernel))
    x, boundaries = torch.randn(2, 33, 16, dtype=torch.float64), torch.zeros(2, 33, dtype=torch.bool)
    expected = results(layer, x, boundaries)
    check_same(results(accelerate(layer), x, boundaries), expected)


class ByteLayer(nn.Module):
    """A layer as in Bolmo: the forget gate is closed by -100,000 at the first byte of each patch."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 3 * 16)
        self.gates = nn.Linear(16, 4)
        options = {"chunkwise_kernel": kernel, "return_last_states": False, "eps": 1e-6}
        self.mlstm_backend = backend_module.mLSTMBackend(backend_module.mLSTMBackendConfig(**options, chunk_size=1))

    def forward(self, x: Tensor, boundaries: Tensor) -> Tensor:
        q, k, v = self.proj(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        i, f = self.gates(x).unflatten(-1, (2, 2)).permute(2, 0, 3, 1)
        f = torch.where(boundaries[:, None], -100_000.0, f.float() if f.dtype != torch.float64 else f)
        h: Tensor = self.mlstm_backend(q=q, k=k, v=v, i=i, f=f)
        return h.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_resets_by_a_closed_gate(kernel: str) -> None:
    """In float32, outputs and gradients are those of the patches alone, which the package computes in float64."""
    exact = randomize(ByteLayer(kernel))
    layer = accelerate(copy.deepcopy(exact).float())
    starts = [0, 1, 30, 31, 64]
    boundaries = torch.zeros(1, 64, dtype=torch.bool)
    boundaries[0, starts[:-1]] = True
    x = torch.randn(1, 64, 16)
    found = results(layer, x, boundaries)
    assert all(t.isfinite().all() for t in found)

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = exact

        def forward(self, x: Tensor) -> Tensor:
            parts = [x[:, a:b] for a, b in itertools.pairwise(starts)]
            return torch.cat([self.layer(part, torch.zeros(part.shape[:2]).bool()) for part in parts], 1)

    torch.manual_seed(2)
    weights = torch.randn(1, 64, 16)
    alone = Patches()(x.double())
    expected = [alone, *torch.autograd.grad(alone, list(exact.parameters()), weights.double())]
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= TOLERANCE[torch.float32]


def test_bidirectional_block() -> None:
    """A block as in TiRex-2 reads a padded batch forwards and, each sequence reversed, backwards."""

    class Block(nn.Module):
        def __init__(self, make: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.forwards, self.backwards = make(), make()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            reverse = reverse_sequences(x, lengths=lengths)
            y: Tensor = self.forwards(x) + reverse_sequences(self.backwards(reverse), lengths=lengths)
            return y

    lengths = [7, 30, 12]
    block = randomize(Block(mlstm_layer))
    xs = [torch.randn(n, 16, dtype=torch.float64) for n in lengths]
    alone = [block.forwards(x[None])[0] + block.backwards(x.flip(0)[None])[0].flip(0) for x in xs]  # type: ignore[operator]
    accelerate(block)
    y = block(nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor(lengths))
    check_same([row[:n] for row, n in zip(y, lengths, strict=True)], alone)


def test_block_of_tirex() -> None:
    """The block itself: covariates are read in both directions, targets forwards."""
    component = pytest.importorskip("tirex2.model.component", reason="pip install tirex-2")
    options = {"norm_reduction_force_float32": False, "chunk_size": 16, "num_heads": 2, "embedding_dim": 32}
    config = component.xLSTMMixedConfig(num_blocks=1, **options)
    block = randomize(component.BiXLSTM(config, 0, 1, "cpu", cell_type="mlstm"))
    x, targets = torch.randn(5, 48, 32, dtype=torch.float64), torch.tensor([True, False, False, True, False])
    expected = results(block, x, targets)
    check_same(results(accelerate(block), x, targets), expected)
    changed = torch.cat([x[:, :-1], x[:, -1:] + 1], 1)
    difference = (block(changed, targets) - block(x, targets))[:, 0].norm(dim=-1)
    assert torch.equal(difference > 1e-6, ~targets)  # only covariates hear of the last step at the first


@pytest.mark.parametrize("name", ["parallel_stabilized_simple", "recurrent_step_stabilized_simple"])
def test_functions_have_the_arguments_of_the_package(name: str) -> None:
    import inspect

    own, original = (inspect.signature(getattr(module, name)).parameters for module in (ours, functions))
    assert {n: p.default for n, p in own.items()} == {n: p.default for n, p in original.items() if n != "kwargs"}


def test_functions_with_an_eps() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 20, 8, dtype=torch.float64)
    i, f = torch.randn(2, 2, 2, 20, 1, dtype=torch.float64)
    found, expected = (m.parallel_stabilized_simple(q, k, v, i, f, eps=0.3) for m in (ours, functions))
    assert error(found, expected) <= 1e-10
    state = torch.randn(2, 2, 8, 8).double(), torch.randn(2, 2, 8, 1).double(), torch.randn(2, 2, 1, 1).double()
    one = [t[:, :, :1] for t in (q, k, v, i, f)]
    results = [
        m.recurrent_step_stabilized_simple(*state, *(t.clone() for t in one), eps=0.3) for m in (ours, functions)
    ]
    check_same(*map(tensors, results))
    assert torch.equal(one[0], q[:, :, :1])


@pytest.mark.parametrize("records", [False, True], ids=["plain", "gradients"])
def test_a_step_with_large_queries_in_float16(records: bool) -> None:
    """The products of queries and sqrt(DH) are above the largest number of float16."""
    torch.manual_seed(4)
    exact = [t.double() for t in torch.randn(3, 2, 2, 1, 64).half()]
    exact[0] = (exact[0] * 1e4).half().double()
    assert 1e4 < exact[0].abs().max() < torch.finfo(torch.float16).max < 8 * exact[0].abs().max()
    gates = [t.double() for t in torch.randn(2, 2, 2, 1, 1).half()]
    state = torch.randn(2, 2, 64, 64).double(), torch.randn(2, 2, 64, 1).double(), torch.randn(2, 2, 1, 1).double()
    expected, _ = functions.recurrent_step_stabilized_simple(*state, *(t.clone() for t in (*exact, *gates)), eps=0.3)
    half = [t.half().requires_grad_(records) for t in (*exact, *gates)]
    found, _ = ours.recurrent_step_stabilized_simple(*(t.float() for t in state), *half, eps=0.3)
    assert (found.shape, found.dtype) == (expected.shape, torch.float16)
    assert error(found, expected) <= TOLERANCE[torch.float16]


def test_what_cannot_be_accelerated() -> None:
    for nothing in (nn.Linear(2, 2), "model", OurBackend(OurBackend.config_class())):
        for function in (accelerate, restore):
            with pytest.raises(TypeError, match=r"^model: got \w+, expected a module with an mLSTMCell"):
                function(nothing)  # type: ignore[type-var]

    class Own(backend_module.mLSTMBackend):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    layer = mlstm_layer()
    model = nn.Sequential(layer, nn.Sequential(Own(backend_module.mLSTMBackendConfig())))
    with pytest.raises(ValueError, match=r"^1\.0: got a Own with a forward of its own"):
        accelerate(model)
    assert layer.mlstm_cell.backend_fn is functions.parallel_stabilized_simple  # type: ignore[union-attr]
    layer.mlstm_cell.backend_fn = functions.chunkwise_simple  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"^mlstm_cell\.backend_fn: got xlstm\.blocks\.mlstm\.backends\.chunkwise_s"):
        accelerate(layer)
    backends = [backend_module.mLSTMBackend(backend_module.mLSTMBackendConfig()) for _ in range(2)]
    backends[1].config.chunkwise_kernel = "chunkwise--later"
    with pytest.raises(ValueError, match=r"^1\.config: name: got 'chunkwise--later', allowed are"):
        accelerate(nn.Sequential(*backends))
    assert "forward" not in vars(backends[0])
    x = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"^stabilize_rowwise: got False"):
        ours.parallel_stabilized_simple(x, x, x, x[..., :1], x[..., :1], stabilize_rowwise=False)
    with pytest.raises(ValueError, match=r"^igate_preact: got shape"):
        ours.parallel_stabilized_simple(x, x, x, x, x[..., :1])
    with pytest.raises(ValueError, match=r"^keys: got shape"):
        ours.parallel_stabilized_simple(x, x[..., :1], x, x[..., :1], x[..., :1])
    with pytest.raises(ValueError, match=r"^c_state: got shape"):
        ours.recurrent_step_stabilized_simple(x, x, x, x, x, x, x, x)
    with pytest.raises(ValueError, match=r"^n_state: got shape"):
        ours.recurrent_step_stabilized_simple(x.mT @ x, x, x, x, x, x, x, x)
    with pytest.raises(TypeError, match=r"^queries: got list"):
        ours.parallel_stabilized_simple([0.0], x, x, x[..., :1], x[..., :1])  # type: ignore[arg-type]
