"""Decoding steps whose states are rows of a pool, read and overwritten by index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FORMS, alike, error, params, problem
from delta_cases import delta_problem, options
from hypothesis import given, settings
from hypothesis import strategies as st
from low_pools import rounding
from pool_prefills import DELTA_FORMS, INDICES, ROWS, SEVERAL_WRITES, Call, prefill, same
from steppers import Stepper, steppers
from torch import Tensor

import tfla
from tfla.backends import BACKENDS, DELTA_BACKENDS, Inputs, StepInputs
from tfla.backends.base import StepSpec
from tfla.backends.delta import DeltaStepInputs, DeltaStepSpec
from tfla.ops.state_pool import PoolRows, as_packed

__all__ = ["rounding"]

EVERY = (*FORMS, *DELTA_FORMS)


@pytest.fixture(params=steppers())
def stepper(request: pytest.FixtureRequest) -> Stepper:
    return request.param


def setting(form: str, device: str, T: int = 3, several: bool = True) -> tuple[Call, dict[str, Tensor], tfla.State]:
    """The step or steps of a form, its arguments for four sequences, and a pool of states."""
    B = ROWS
    if form in DELTA_FORMS:
        p: Any = delta_problem(form, B=B, T=T, H=2, Hq=1, dtype=torch.float32)
        x = {name: t.to(device) for name, t in p.leaves.items() if name != "C"}
        pool = tfla.State(p.leaves["C"].to(device).clone())
        more = options(log_f=x.pop("log_f", None), read_key=x.pop("read_key", None))
        if form == "gla":
            fn: Call = tfla.linear_attention_steps if several else tfla.linear_attention_step
            tensors, more = {name: x[name] for name in "qkv"} | {"log_f": more["log_f"]}, {}
        else:
            fn = tfla.delta_rule_steps if several else tfla.delta_rule_step
            tensors, more = x | {n: t for n, t in more.items() if isinstance(t, Tensor)}, {}
    else:
        p = problem(form, B=B, T=T, H=2, Hq=1, dtype=torch.float32)
        tensors = {name: getattr(p, name).to(device) for name in "qkvif"}
        pool = p.state.to(device).clone()
        if form in ("exp", "sigmoid"):
            fn, more = (tfla.mlstm_steps if several else tfla.mlstm_step), {"input_gate": form}
        else:
            fn, more = (tfla.linear_attention_steps if several else tfla.linear_attention_step), {}
            tensors = {name: tensors[name] for name in "qkv"} | {"log_f": tensors["f"], "log_i": tensors["i"]}
            more["normalize"] = p.normalize
    tensors = {name: t[: len(INDICES)] if several else t[: len(INDICES), 0] for name, t in tensors.items()}

    def call(state: tfla.State, rows: Tensor | None = None, **given: Any) -> Any:
        x = tensors if rows is None else {name: t[rows] for name, t in tensors.items()}
        with torch.no_grad():
            return fn(**x, state=state, **more, **given)

    return call, tensors, pool


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("form", params({form: form for form in EVERY}, set(EVERY)))
def test_rows_of_a_pool_are_its_states(stepper: Stepper, form: str, dtype: torch.dtype) -> None:
    """Bit by bit what the same sequences yield with states of their own; nothing else of the pool changes."""
    indices = torch.tensor(INDICES, dtype=dtype, device=stepper.device)
    taken = torch.tensor([0, 2, 3], device=stepper.device)
    for several in (False, True):
        call, _, pool = setting(form, stepper.device, several=several)
        lengths = [{}, {"lengths": torch.tensor([1, 2, 0, 3], device=stepper.device)}] if several else [{}]
        for more in lengths:
            own = pool.clone()
            h, new = call(own, state_indices=indices, backend=stepper.backend, **more)
            short = {name: t[taken] for name, t in more.items()}
            expected_h, states = call(pool.gather(indices[taken]), taken, backend=stepper.backend, **short)
            expected = pool.clone()
            expected.scatter(indices[taken], states)
            assert torch.equal(h[taken], expected_h)
            assert (h[1] == 0).all()
            assert same(own, expected)
            assert all(a is b for a, b in zip(new, own, strict=True))
        if several:
            assert torch.equal(h, call(pool, state_indices=indices, backend=stepper.backend, return_state=False))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "gdn"])
def test_a_pool_in_pages(stepper: Stepper, form: str) -> None:
    """Rows may stand apart, as in pages that hold the states of several layers."""
    call, _, pool = setting(form, stepper.device)
    pages = [None if t is None else torch.zeros(ROWS, 2, *t.shape[1:], device=t.device) for t in pool]
    own = tfla.State(*(None if t is None else t[:, 1] for t in pages))
    for ours, t in zip(own, pool, strict=True):
        if ours is not None:
            ours.copy_(t)
    indices = torch.tensor(INDICES, device=stepper.device)
    h, _ = call(own, state_indices=indices, backend=stepper.backend)
    expected_h, _ = call(pool, state_indices=indices, backend=stepper.backend)
    assert torch.equal(h, expected_h)
    assert same(own, pool)
    assert all(t is None or (t[:, 0] == 0).all() for t in pages)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "gdn"])
def test_nothing_but_padding(stepper: Stepper, form: str) -> None:
    call, _, pool = setting(form, stepper.device)
    own = pool.clone()
    h, _ = call(own, state_indices=torch.full((4,), -1, device=stepper.device), backend=stepper.backend)
    assert (h == 0).all()
    assert same(own, pool)


@pytest.mark.interpreter
@pytest.mark.parametrize("T", [1, 3])
def test_indices_that_no_host_reads_write_nothing_out_of_range(stepper: Stepper, T: int) -> None:
    """The kernels are called directly, since on a CPU, where Triton's interpreter runs, the operator refuses them."""
    if stepper.backend == "reference":
        pytest.skip("reads the values")
    indices = torch.tensor([2, ROWS, -5, 2**40], device=stepper.device)
    _, x, pool = setting("exp", stepper.device, T)
    before = pool.clone()
    given = StepInputs(*(x[name] for name in "qkvif"), *pool, None, indices)
    h = BACKENDS["triton"].steps(given, StepSpec(0.5, "exp", True), pool.C).h
    assert h[0].isfinite().all()
    assert h[1:].isnan().all()
    assert all(torch.equal(a[1], b[1]) and not torch.equal(a[2], b[2]) for a, b in zip(pool, before, strict=True))
    _, x, pool = setting("gdn", stepper.device, T)
    before = pool.clone()
    inputs = DeltaStepInputs(*(x[n] for n in ("q", "k", "v", "beta", "log_f")), None, None, None, pool.C, None, indices)
    h, _ = DELTA_BACKENDS["triton"].steps(inputs, DeltaStepSpec(0.5, True, False, True), pool.C)
    assert h[0].isfinite().all()
    assert h[1:].isnan().all()
    changed = (pool.C != before.C).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [2]


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid", "gdn"])
def test_compile(stepper: Stepper, form: str) -> None:
    """Two steps in one graph, the second of which reads what the first has written."""
    torch.compiler.reset()
    call, _, pool = setting(form, stepper.device, several=False)
    own, compiled = pool.clone(), pool.clone()
    indices = torch.tensor(INDICES, device=stepper.device)

    def twice(state: tfla.State, indices: Tensor) -> Tensor:
        _, state = call(state, state_indices=indices, backend=stepper.backend)
        return call(state, state_indices=indices, backend=stepper.backend)[0]

    expected = twice(own, indices)
    found = torch.compile(twice, fullgraph=True, backend="aot_eager")(compiled, indices)
    torch.testing.assert_close(found, expected)
    for a, b in zip(own, compiled, strict=True):
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    if stepper.device == "cpu":
        with pytest.raises(ValueError, match=r"^state_indices: got 5 more than once"):
            torch.compile(twice, fullgraph=True, backend="aot_eager")(compiled, torch.tensor([5, 5, -1, 0]))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid", "gdn"])
def test_opcheck(stepper: Stepper, form: str) -> None:
    if stepper.backend == "reference":
        pytest.skip("the reference is traced as it is")
    _, x, pool = setting(form, stepper.device, T=2)
    indices = torch.tensor(INDICES, device=stepper.device)
    if form == "gdn":
        args = (*(x[n] for n in ("q", "k", "v", "beta", "log_f")), None, None, None, pool.C, None, indices)
        torch.library.opcheck(torch.ops.tfla.delta_steps_.default, (*args, 0.5, True, False, "triton"))
        torch.library.opcheck(torch.ops.tfla.delta_steps.default, (*args, 0.5, True, False, "triton", False))
        return
    args = (*(x[n] for n in "qkvif"), *pool, None, indices)
    torch.library.opcheck(torch.ops.tfla.steps_pool_.default, (*args, 0.5, form, "triton"))
    torch.library.opcheck(torch.ops.tfla.steps.default, (*args, 0.5, form, "triton", False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", EVERY)
def test_capture_in_a_graph(form: str) -> None:
    """One graph serves whatever rows stand in the tensor of indices at its replay."""
    call, _, pool = setting(form, "cuda", several=False)
    indices = torch.tensor(INDICES, device="cuda")
    call(pool.clone(), state_indices=indices)  # compiles
    own, graph = pool.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, _ = call(own, state_indices=indices)
    for rows in ((0, 1, 2, 3), (6, -1, 4, 1)):
        indices.copy_(torch.tensor(rows))
        expected, _ = call(pool, state_indices=indices)
        graph.replay()
        assert torch.equal(h, expected)
        assert same(own, pool)


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"state_indices": [0, 1, 2, 3]}, TypeError, ("state_indices:", "list", "int64")),
        ({"state_indices": torch.zeros(4)}, TypeError, ("state_indices:", "float32")),
        ({"state_indices": torch.arange(3)}, ValueError, ("state_indices:", "(3,)", "(4)")),
        ({"state_indices": torch.tensor([0, 1, 2, 7])}, ValueError, ("state_indices:", "got 7", "from 0 to 6")),
        ({"state_indices": torch.tensor([0, 1, 2, -2])}, ValueError, ("state_indices:", "got -2", "expected -1 or")),
        ({"state_indices": torch.tensor([0, 4, 2, 4])}, ValueError, ("state_indices:", "got 4 more than once")),
        ({"state_indices": torch.arange(4, device="meta")}, ValueError, ("state_indices:", "device meta", "cpu")),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["exp", "gdn", "gla"])
def test_wrong_indices(form: str, change: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]) -> None:
    for several in (False, True):
        call, _, pool = setting(form, "cpu", several=several)
        with pytest.raises(kind) as caught:
            call(pool, **change)
        assert all(part in str(caught.value) for part in parts), caught.value


def test_a_pool_that_cannot_be_overwritten() -> None:
    call, x, pool = setting("exp", "cpu")
    indices = torch.tensor(INDICES)
    with pytest.raises(TypeError, match=r"^state.n: got dtype torch.float64, expected torch.float32"):
        call(pool._replace(n=pool.n.double()), state_indices=indices)
    with pytest.raises(ValueError, match=r"^state.m: got strides .*, expected no 0: state_indices"):
        call(pool._replace(m=pool.m[:1].expand(ROWS, 2)), state_indices=indices)
    with pytest.raises(ValueError, match=r"^state.n: got strides .* dense"):
        call(pool._replace(n=pool.n.transpose(1, 2).contiguous().transpose(1, 2)), state_indices=indices)
    with pytest.raises(ValueError, match=r"^state_indices: got them while gradients are recorded"):
        tfla.mlstm_steps(**{n: t.clone().requires_grad_() for n, t in x.items()}, state=pool, state_indices=indices)
    h = tfla.mlstm_steps(
        **{n: t.clone().requires_grad_() for n, t in x.items()}, state=pool, state_indices=indices, return_state=False
    )
    assert h.requires_grad  # nothing is overwritten


def test_more_sequences_than_rows_is_an_error_that_names_the_pool() -> None:
    call, _, pool = setting("exp", "cpu")
    with pytest.raises(ValueError, match=r"^state.C: got shape \(7, "):
        call(pool)  # without indices the batch is 4


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", ["exp", "sigmoid", *DELTA_FORMS, *SEVERAL_WRITES])
def test_a_prefill_reads_and_writes_rows_of_a_pool(device: str, form: str, dense: bool) -> None:
    call, pool = prefill(form, device, dense=dense)
    indices, taken = torch.tensor(INDICES, device=device), [0, 2, 3]
    start = pool.gather([5, 1, 0, 3])
    start.reset([1])
    expected_h, final = call(start, return_state=True)
    own, expected = pool.clone(), pool.clone()
    expected.scatter([5, 0, 3], final.gather(taken))
    h, new = call(own, return_state=True, state_indices=indices)
    assert torch.equal(h, expected_h)
    # Kernels of GPUs get dense batches as packed sequences, for which others are compiled.
    assert (alike if dense and device == "cuda" else same)(own, expected)
    assert new is own
    start, written = own.gather([5, 1, 0, 3]), own.clone()
    start.reset([1])
    assert torch.equal(call(own, state_indices=indices), call(start))
    assert same(own, written)  # without return_state nothing is written


KERNEL_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
IN_KERNELS = (*DELTA_FORMS, *SEVERAL_WRITES)  # forms whose kernels read and overwrite rows of a prefill


@pytest.fixture(params=[own for own in steppers() if own.values[0].backend == "triton"])
def kernels(request: pytest.FixtureRequest) -> Stepper:
    """Return the Triton backend, with each device on which its kernels run."""
    return request.param


def refused(*_: object) -> None:
    raise AssertionError("rows of the pool are gathered or scattered")


@pytest.mark.interpreter
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("dense", "dtype_of_pool"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("form", IN_KERNELS)
def test_kernels_of_a_prefill_take_the_rows(
    kernels: Stepper, form: str, dense: bool, dtype_of_pool: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit the results of states of their own, without a launch that gathers or scatters; also rows in pages."""
    call, pool = prefill(form, kernels.device, KERNEL_DTYPE[kernels.device], dense)
    pool = tfla.State(pool.C.to(dtype_of_pool))
    start = tfla.State(pool.gather([5, 1, 0, 3]).C.float())
    start.reset([1])
    expected_h, final = call(start, return_state=True, backend=kernels.backend)
    expected = pool.clone()
    expected.scatter([5, 0, 3], final.gather([0, 2, 3]))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, refused)
    pages = torch.zeros(ROWS, 2, *pool.C.shape[1:], dtype=dtype_of_pool, device=kernels.device)
    for own in (pool.clone(), tfla.State(pages[:, 1])):
        own.C.copy_(pool.C)
        for dtype in (torch.int64, torch.int32):
            indices = torch.tensor(INDICES, dtype=dtype, device=kernels.device)
            own.C.copy_(pool.C)
            assert torch.equal(call(own, state_indices=indices, backend=kernels.backend), expected_h)
            assert same(own, pool)  # without return_state nothing is written
            h, new = call(own, return_state=True, state_indices=indices, backend=kernels.backend)
            assert torch.equal(h, expected_h)
            assert same(own, expected)
            assert new is own
    assert (pages[:, 0] == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", ["gdn", "kda"])
def test_kernels_of_a_prefill_write_no_row_out_of_range(
    kernels: Stepper, form: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs no host reads the values: a sequence of a row that the pool does not have is NaN, others are right."""
    call, pool = prefill(form, kernels.device, KERNEL_DTYPE[kernels.device], dense)
    expected_h, final = call(pool.gather([2, 0, 0, 4]), return_state=True, backend=kernels.backend)
    monkeypatch.setattr("tfla.ops.checks.check_values_of_indices", lambda *_: None)
    indices = torch.tensor([2, -5, 2**40, 4], device=kernels.device)
    own, expected = pool.clone(), pool.clone()
    expected.scatter([2, 4], final.gather([0, 3]))
    h, _ = call(own, return_state=True, state_indices=indices, backend=kernels.backend)
    h, expected_h = h.flatten(0, 1), expected_h.flatten(0, 1)
    lacking = slice(9, 27) if dense else slice(20, 31)
    assert h[lacking].isnan().all()
    for rest in (slice(lacking.start), slice(lacking.stop, None)):
        assert torch.equal(h[rest], expected_h[rest])
    assert same(own, expected)


@pytest.mark.interpreter
@pytest.mark.parametrize("operator", [tfla.mlstm, tfla.delta_rule], ids=lambda operator: operator.__name__)
def test_gradients_reach_a_pool_that_is_not_overwritten(kernels: Stepper, operator: Call) -> None:
    """Also where nothing else has gradients."""
    sizes = ((16,), (16,), (8,), (), ())
    q, k, v, i, f = (torch.rand(4, 5, 2, *d, dtype=KERNEL_DTYPE[kernels.device], device=kernels.device) for d in sizes)
    parts = [torch.ones(ROWS, 2, *d, device=kernels.device) for d in ((16, 8), (16,), ())]
    pool = tfla.State(parts[0].requires_grad_(), *(parts[1:] if operator is tfla.mlstm else ()))
    indices = torch.tensor(INDICES, device=kernels.device)
    operator(
        q, k, v, i, -f, initial_state=pool, state_indices=indices, backend=kernels.backend
    ).sum().backward()  # fmt: skip
    assert pool.C.grad is not None
    assert pool.C.grad.flatten(1).any(1).tolist() == [row in INDICES for row in range(ROWS)]


@pytest.mark.interpreter
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", ["gdn", "gla"])
def test_a_prefill_that_raises_writes_nothing(kernels: Stepper, form: str, dense: bool) -> None:
    call, pool = prefill(form, kernels.device, KERNEL_DTYPE[kernels.device], dense)
    own, indices = pool.clone(), torch.tensor(INDICES, device=kernels.device)
    for change, match in (
        ({"chunk_size": 0}, "chunk_size: got 0"), ({"kernel": "none"}, "kernel: got 'none'"), ({"scale": "1"}, "scale"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=f"^{match}"):
            call(own, return_state=True, state_indices=indices, backend=kernels.backend, **change)
    wrong = own._replace(C=own.C[:, :, :-1])
    with pytest.raises(ValueError, match=r"^initial_state.C: got shape"):
        call(wrong, return_state=True, state_indices=indices, backend=kernels.backend)
    assert same(own, pool)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["gdn", "kda"])
def test_a_pool_whose_rows_share_memory(kernels: Stepper, form: str) -> None:
    call, pool = prefill(form, kernels.device, KERNEL_DTYPE[kernels.device])
    wide, indices = pool.C[:1].expand(pool.C.shape), torch.tensor(INDICES, device=kernels.device)
    found, expected = (
        call(pool._replace(C=C), state_indices=indices, backend=kernels.backend) for C in (wide, wide.contiguous())
    )
    assert torch.equal(found, expected)


@given(
    B=st.integers(1, 3), T=st.integers(1, 3), order=st.permutations(range(4)), spare=st.integers(0, 2),
    gates=st.booleans(), gap=st.sampled_from([(0, 0), (1, 0), (0, 1)]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_batch_is_packed_where_that_is_a_view(
    B: int, T: int, order: list[int], spare: int, gates: bool, gap: tuple[int, int]
) -> None:
    """The sequences of a batch, (B, T, ...) in any order of dims and with gaps, one after another in one row."""
    sizes = [B + gap[0], T + gap[1], 2, 3 + spare]
    back = [order.index(d) for d in range(4)]
    v = torch.randn([sizes[d] for d in order]).permute(back)[:B, :T, :, :3]
    log_f = v[..., 0] if gates else torch.randn(2).expand(B, T, 2)
    x = Inputs(torch.randn(B, T, 1, 2), torch.randn(B, T, 1, 2), v, None, log_f, None, None, None, None)
    packed = as_packed(x)
    try:
        expected = v.view(1, B * T, 2, 3)
    except RuntimeError:
        assert packed is None
        return
    assert packed is not None
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [T * b for b in range(B + 1)]
    assert torch.equal(packed.v, expected)
    assert torch.equal(packed.log_f, log_f.flatten(0, 1)[None])
    assert packed.v.data_ptr() == v.data_ptr()
    assert packed.log_f.data_ptr() == log_f.data_ptr()
    assert packed.sequences == B
    assert as_packed(packed) is packed


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_an_empty_batch_is_not_packed(B: int, T: int) -> None:
    x = torch.zeros(B, T, 2, 3)
    assert as_packed(Inputs(x, x, x, None, x[..., 0], None, None, None, None)) is None


@pytest.mark.parametrize("form", ["exp", "gdn", "gla"])
def test_wrong_indices_of_a_prefill(form: str) -> None:
    call, pool = prefill(form, "cpu")
    for change, kind, match in (
        ({"state_indices": torch.tensor([0, 1])}, ValueError, r"state_indices: got shape \(2,\)"),
        ({"state_indices": torch.tensor([0, 1, 2, 7])}, ValueError, "state_indices: got 7, expected -1 or from 0 to 6"),
        ({"state_indices": torch.tensor([0, 1, 2, 2])}, ValueError, "state_indices: got 2 more than once"),
    ):
        with pytest.raises(kind, match=f"^{match}"):
            call(pool, **change)
    with pytest.raises(ValueError, match=r"^state_indices: got 0, expected -1: the state has no rows"):
        call(tfla.State(*(None if t is None else t[:0] for t in pool)), state_indices=torch.tensor([-1, 0, -1, -1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^state_indices: got them with initial_state NoneType"):
        call(None, state_indices=torch.tensor(INDICES))
    wide = pool._replace(C=pool.C[:1].expand(pool.C.shape))
    with pytest.raises(ValueError, match=r"^initial_state.C: got strides .*, expected no 0"):
        call(wide, state_indices=torch.tensor(INDICES), return_state=True)


POOL = {"C": torch.zeros(5, 2, 8, 6), "n": torch.zeros(5, 2, 8), "m": torch.zeros(5, 2)}
BAD_POOLS = {
    "no C": ({"C": None}, TypeError, "C: got NoneType, expected a tensor"),
    "list": ({"n": [0.0]}, TypeError, "n: got list, expected a tensor"),
    "fewer rows of n": ({"n": torch.zeros(3, 2, 8)}, ValueError, r"n: got shape \(3, 2, 8\), expected \(5, 2, 8\)"),
    "more rows of m": ({"m": torch.zeros(7, 2)}, ValueError, r"m: got shape \(7, 2\), expected \(5, 2\)"),
    "integers": ({"n": torch.zeros(5, 2, 8, dtype=torch.int64)}, TypeError, "n: got dtype torch.int64, expected"),
    "one state": ({"C": torch.zeros(2, 8, 6)}, ValueError, r"C: got shape \(2, 8, 6\), expected \(rows, H, dqk, dhv\)"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "error", "words"), BAD_POOLS.values(), ids=BAD_POOLS)
def test_parts_of_a_pool_that_do_not_fit(parts: dict[str, Any], error: type[Exception], words: str) -> None:
    p = problem("exp", B=2, T=3, H=2, Hq=2, K=8, V=6, dtype=torch.float32)
    pool, indices = tfla.State(**POOL | parts), torch.tensor([4, 1])
    x = [getattr(p, name) for name in "qkvif"]
    step = [t[:, 0] for t in x]
    for every in (None, 2):
        with pytest.raises(error, match=f"^initial_state.{words}"):
            tfla.mlstm(*x, initial_state=pool, state_indices=indices, return_state=True, states_every=every)
    with pytest.raises(error, match=f"^state.{words}"):
        tfla.mlstm_step(*step, pool, state_indices=indices)
    with pytest.raises(error, match=f"^state.{words}"):
        tfla.mlstm_steps(*x, pool, state_indices=indices)


def test_export_of_a_prefill() -> None:
    p = problem("exp", B=4, T=37, H=2, Hq=1, dtype=torch.float32)
    pool = problem("exp", B=ROWS, T=1, H=2, Hq=1, dtype=torch.float32).state

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, pool: tfla.State, rows: Tensor) -> Any:
            return tfla.mlstm(q, k, v, i, f, initial_state=pool, state_indices=rows, return_state=True)[0]

    x, own, indices = (p.q, p.k, p.v, p.i, p.f), pool.clone(), torch.tensor(INDICES)
    exported = torch.export.export(Layer(), (*x, pool.clone(), indices), strict=False).module()
    assert torch.equal(exported(*x, own, indices), Layer()(*x, pool, indices))
    assert same(own, pool)


@pytest.mark.parametrize("T", [3, 40], ids=["steps", "prefill"])
def test_vmap_over_indices(T: int) -> None:
    p = problem("exp", B=2, T=T, H=2, Hq=1, dtype=torch.float32)
    pool = problem("exp", B=ROWS, T=1, H=2, Hq=1, dtype=torch.float32).state

    def outputs(indices: Tensor) -> Tensor:
        x = p.q, p.k, p.v, p.i, p.f
        if T == 3:
            return tfla.mlstm_steps(*x, pool, state_indices=indices, return_state=False)
        return tfla.mlstm(*x, initial_state=pool, state_indices=indices)

    given = torch.tensor([[0, 1], [1, -1], [6, 0]])
    expected = torch.stack([outputs(each) for each in given])
    for dim in range(2):
        assert error(torch.vmap(outputs, in_dims=dim)(given.movedim(0, dim)), expected) < 1e-6
    with pytest.raises(ValueError, match=r"^state_indices: got 7, expected -1 or from 0 to 6"):
        torch.vmap(outputs)(given + 1)
