"""Tests of the Hopper backend at its head dims, which are too large for the operator's general suite.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, the Hopper kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import (
    FORMS,
    INTERPRETED,
    TOLERANCE,
    Implementation,
    Problem,
    call,
    check_beside_terms,
    check_nothing_leaks,
    error,
    leaves_on,
    problem,
    solve,
)
from hopper_simulation import simulation
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tfla
from tfla._util import caching
from tfla.backends import BACKENDS, hopper
from tfla.backends.base import Inputs, Spec
from tfla.backends.hopper.head_dims import SMALL_HEADS

__all__ = ["simulation"]  # a fixture of all tests of this module

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
pytestmark = [] if INTERPRETED else on_hopper
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)

HOPPER = Implementation("hopper", "fused", "cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
DTYPE = DTYPES[0]
MANY_HEADS = 3 if INTERPRETED else 50


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1},
    "a tile": {"T": 64},
    "a step more than a tile": {"T": 65},
    "a step less than a tile": {"T": 63},
    "several tiles": {"T": 300, "B": 1, "H": 1, "Hq": 1},
    "dhv 128": {"V": 128, "T": 130},
    "more heads than multiprocessors": {"B": 3, "H": MANY_HEADS, "Hq": MANY_HEADS, "T": 70},
    "grouped heads": {"H": 6, "Hq": 2},
}
PADDED = [(32, 32), (40, 56), (64, 96), (72, 40), (96, 96), (96, 192), (64, 256), (192, 160), (160, 320)]
# Sizes and chunk sizes that between them run every kernel and every branch of it.
SMALL: dict[str, tuple[dict[str, Any], int | None]] = {
    "128 x 256": ({"T": 130, "Hq": 1}, None),
    "128 x 128": ({"T": 330, "V": 128, "Hq": 1, "carried": False}, None),
    "64 x 64": ({"T": 330, "K": 64, "V": 64, "H": 4}, None),
    "64 x 128": ({"K": 64, "V": 128}, None),
    "128 x 64": ({"V": 64, "carried": False}, None),
    "256 x 256": ({"T": 70, "K": 256, "H": 1, "Hq": 1}, None),
    "128 x 512": ({"T": 70, "V": 512, "H": 1, "Hq": 1}, None),
    "padded": ({"T": 70, "K": 96, "V": 192}, None),
    "segments": ({"T": 200}, 64),
    "segments of 128 x 128": ({"T": 200, "V": 128, "carried": False}, 64),
    "segments of 64 x 64": ({"T": 200, "K": 64, "V": 64}, 64),
    "packed": ({"lengths": (1, 63, 0, 64, 130), "Hq": 1}, None),
    "packed segments": ({"lengths": (0, 130, 1, 65), "H": 1, "Hq": 1}, 64),
    "packed segments of 64 x 64": ({"lengths": (65, 0, 130), "K": 64, "V": 64, "carried": False}, 64),
}
PACKED: dict[str, tuple[int, ...]] = {
    "around a tile": (1, 63, 64, 65, 130),
    "empty": (0, 70, 0, 0, 5, 0),
    "single steps": (1, 1, 1, 1),
    "one": (150,),
}


@pytest.fixture
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that sets how many multiprocessors the backend finds."""
    from tfla.backends.hopper import host

    def set_count(count: int) -> None:
        monkeypatch.setattr(host, "processors", lambda device: count)
        caching.clear_caches()

    yield set_count
    caching.clear_caches()


@pytest.fixture(autouse=True)
def refuse_by_dtype_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `leaves_on`, which asks with head dims of 16, look at the dtype only."""
    monkeypatch.setattr(
        Implementation,
        "refusal",
        lambda implementation, dtype: None if dtype in hopper.DTYPES else "takes bfloat16 and float16",
    )


def check(p: Problem, tolerance: float = 1.0, **options: Any) -> None:
    check_beside_terms(solve(p, HOPPER, **options), p, tolerance * TOLERANCE[p.dtype])


def wide(form: str, **sizes: Any) -> Problem:
    return problem(form, **{"K": 128, "V": 256, "T": 150, **sizes})


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "chunk_size"), SMALL.values(), ids=SMALL.keys())
def test_small(form: str, sizes: dict[str, Any], chunk_size: int | None) -> None:
    check(wide(form, **{"B": 1, "dtype": DTYPE, **sizes}), chunk_size=chunk_size)


@pytest.mark.interpreter
@pytest.mark.parametrize("size", ["128 x 128", "64 x 64", "256 x 256", "segments", "packed segments"])
def test_states_that_grow(size: str) -> None:
    """States grow by exp(40) and shrink again; in float16, which ends at 65,504, by exp(4).

    Only a few gradients of gates at the peak are large, so that with one head the norm is that of one inner product.
    """
    sizes, chunk_size = SMALL[size]
    p = wide("plain", **{"B": 1, "dtype": DTYPE, **sizes, "H": 4, "Hq": 2})
    slope = torch.where(torch.arange(p.f.shape[1]) // 40 % 2 == 0, 1.0, -1.0)
    slope *= 0.1 if p.dtype == torch.float16 else 1.0
    check(p.but(f=slope[None, :, None].expand_as(p.f).contiguous()), chunk_size=chunk_size)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["plain", "normalized"])
@pytest.mark.parametrize("size", ["128 x 128", "64 x 64", "256 x 256", "segments", "packed segments"])
def test_without_an_input_gate(form: str, size: str) -> None:
    sizes, chunk_size = SMALL[size]
    check(wide(form, **{"B": 1, "dtype": DTYPE, **sizes}).but(i=None), chunk_size=chunk_size)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256)])
def test_bfloat16(form: str, K: int, V: int) -> None:
    check(wide(form, dtype=torch.bfloat16, T=130, B=1, K=K, V=V))


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="the order is that of the simulator")
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256)])
def test_same_bits_in_whatever_order(form: str, K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gluon_simulator import language

    p = wide(form, dtype=DTYPE, T=130, B=1, K=K, V=V)
    runs = []
    for seed in range(3):
        monkeypatch.setattr(language, "SEED", seed)
        runs.append(solve(p, HOPPER))
    for found in runs[1:]:
        assert all(torch.equal(x, runs[0][name]) for name, x in found.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carried", [True, False], ids=["carried", "from zero"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(form: str, carried: bool, shape: dict[str, Any], dtype: torch.dtype) -> None:
    p = wide(form, dtype=dtype, carried=carried, **shape)
    check(p)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 64, 100, 192])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 256), (256, 512)])
def test_segments(form: str, chunk_size: int, K: int, V: int) -> None:
    p = wide(form, dtype=DTYPE, T=333, B=1, K=K, V=V)
    check(p, chunk_size=chunk_size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carried", [True, False], ids=["carried", "from zero"])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED.keys())
def test_packed(form: str, carried: bool, lengths: tuple[int, ...]) -> None:
    check(wide(form, dtype=DTYPE, carried=carried, lengths=lengths, Hq=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [None, 64, 100])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 256), (256, 512)])
def test_packed_segments(form: str, chunk_size: int | None, K: int, V: int) -> None:
    p = wide(form, dtype=torch.float16, lengths=(0, 200, 1, 0, 130, 65), H=1, Hq=1, K=K, V=V)
    check(p, chunk_size=chunk_size)


@pytest.mark.parametrize("carried", [True, False], ids=["carried", "from zero"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(("K", "V"), [*SMALL_HEADS, (128, 128), (128, 256)])
def test_programs_with_many_packed_sequences(
    form: str, carried: bool, K: int, V: int, monkeypatch: pytest.MonkeyPatch, multiprocessors: Callable[[int], None]
) -> None:
    from tfla.backends.hopper import host

    monkeypatch.setattr(host, "MAX_PROGRAMS_PER_SM", 1)
    multiprocessors(2)
    lengths = (5, 0, 70, 0, 128, 1, 0, 33, 64, 200)
    check(wide(form, dtype=DTYPE, carried=carried, lengths=lengths, Hq=1, K=K, V=V))


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [1, 132])
@pytest.mark.parametrize(("form", "K", "V"), [("exp", 128, 256), ("sigmoid", 128, 256), ("exp", 256, 512)])
def test_states_of_segments_whole_and_in_halves(
    form: str, K: int, V: int, count: int, multiprocessors: Callable[[int], None]
) -> None:
    """Programs take half of the columns where whole ones would leave multiprocessors idle."""
    multiprocessors(count)
    check(wide(form, dtype=DTYPE, B=1, T=200, H=1, Hq=1, K=K, V=V), chunk_size=64)


@pytest.mark.interpreter
@pytest.mark.parametrize("chunk_size", [128, 512])
@pytest.mark.parametrize(("K", "V"), [(128, 256), (256, 128)])
def test_denominators(K: int, V: int, chunk_size: int) -> None:
    """d is exact to float32: where |d| is next to exp(-m), its last digits decide on the whole gradient of it."""
    p = wide("exp", dtype=torch.bfloat16, T=400, B=1, H=1, Hq=1, K=K, V=V, f_mean=7.0, carried=False)
    inputs = Inputs(*(getattr(p, name).to(HOPPER.device) for name in "qkvif"), None, None, None, None)
    spec = Spec(
        scale=0.1, normalize=True, normalizer_grad=True, chunk_size=chunk_size, kernel="fused", save=True,
        final_state=False, gates="exp",
    )  # fmt: skip
    d = BACKENDS["hopper"].forward(inputs, spec).d
    q, k, v, i, f = (x.double() for x in inputs[:5])
    exact = inputs._replace(q=q, k=k, v=v, log_i=i, log_f=torch.nn.functional.logsigmoid(f))
    assert error(d, BACKENDS["chunkwise"].forward(exact, spec._replace(gates="log")).d) <= 1e-6


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("value", [3.0, torch.nan, torch.inf], ids=["other numbers", "nan", "infinite"])
@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_nothing_leaks_into_neighbours(form: str, changed: int, value: float, chunk_size: int | None) -> None:
    check_nothing_leaks(wide(form, dtype=DTYPE, lengths=(20, 90, 70)), HOPPER, changed, value, chunk_size=chunk_size)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize("V", [128, 256])
def test_checkpoints_of_packed_sequences(form: str, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfla.backends.gpu import checkpoints

    monkeypatch.setattr(checkpoints, "CHECKPOINT_STEPS", {2: 128})
    check(wide(form, dtype=DTYPE, lengths=(300, 70, 129, 0, 128), H=1, Hq=1, V=V))


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter, which passes states on, takes bfloat16 for integers")
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_stored_states_of_lower_precision(form: str) -> None:
    p = wide(form, dtype=DTYPE, T=333, B=1, f_mean=5.0)
    check(p, chunk_size=64, store_dtype=torch.bfloat16)


@pytest.mark.parametrize("form", ["exp", "normalized"])
def test_paper_convention(form: str) -> None:
    p = wide(form, dtype=DTYPE).but(normalizer_grad=False)
    check(p)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize("scale", [-0.1, 0.0])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 256)])
def test_scale(form: str, scale: float, K: int, V: int) -> None:
    check(wide(form, dtype=DTYPE, K=K, V=V).but(scale=scale))


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(("i_mean", "f_mean"), [(-8.0, 8.0), (6.0, -3.0), (0.0, 12.0)])
def test_gate_regimes(form: str, i_mean: float, f_mean: float) -> None:
    p = wide(form, dtype=torch.bfloat16, i_mean=i_mean, f_mean=f_mean, positive_qk=form == "exp", T=200)
    check(p)


def test_resets_and_nan_stay_where_they_are() -> None:
    p = wide("sigmoid", dtype=DTYPE, B=3, T=130, carried=False)
    f = p.f.clone()
    f[:, 70] = -1e4
    p.v[1, 40] = torch.nan
    leaves = leaves_on(HOPPER, p.but(f=f))
    h, _ = call(p, leaves, **HOPPER.options)
    assert h[[0, 2]].isfinite().all()
    tail = tfla.mlstm(*(leaves[n][:, 70:] for n in "qkvif"), input_gate="sigmoid", **HOPPER.options)
    assert error(h[[0, 2], 70:], tail[[0, 2]]) <= TOLERANCE[p.dtype]


@pytest.mark.skipif(INTERPRETED, reason="would take hours")
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(
    ("K", "V", "B", "H"), [
        (128, 128, 2, 9), (128, 256, 2, 9), (256, 512, 2, 9), (512, 512, 2, 5),
        *((*dims, 8, 40) for dims in SMALL_HEADS), (128, 128, 8, 40), (128, 256, 8, 40), (256, 256, 4, 40),
    ],
)  # fmt: skip
def test_same_bits_every_time(form: str, K: int, V: int, B: int, H: int) -> None:
    """Results repeat bit for bit, also where every multiprocessor has one head after another and waits are longest."""
    p = wide(form, dtype=DTYPE, B=B, H=H, Hq=H, T=500, K=K, V=V)
    leaves = leaves_on(HOPPER, p)
    runs = []
    for _ in range(20):
        h, state = call(p, leaves, **HOPPER.options)
        grads = torch.autograd.grad((h * p.dh.to(h)).sum() + state.C.sum(), list(leaves.values()), allow_unused=True)
        runs.append([h, state.C, *(g for g in grads if g is not None)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize(
    ("K", "V"), [(1024, 1024), (512, 512), (384, 640), (256, 512), (256, 256), (512, 128), (128, 512)]
)
def test_wide_states(form: str, K: int, V: int) -> None:
    check(wide(form, dtype=DTYPE, K=K, V=V, Hq=1, T=200))
    check(wide(form, dtype=torch.float16, K=K, V=V, T=100, carried=False))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "V"), SMALL_HEADS)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_small_heads(form: str, K: int, V: int, group: int) -> None:
    sizes = {"K": K, "V": V, "H": 2 * group, "Hq": 2}
    check(wide(form, dtype=DTYPE, T=200, **sizes))
    check(wide(form, dtype=DTYPE, T=333, carried=False, **sizes), chunk_size=100)
    check(wide(form, dtype=torch.float16, T=63, **sizes))
    check(wide(form, dtype=DTYPE, lengths=(0, 130, 1, 64), **sizes))
    check(wide(form, dtype=DTYPE, lengths=(65, 0, 200), carried=False, **sizes), chunk_size=64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "V"), PADDED)
def test_padded_heads(form: str, K: int, V: int) -> None:
    """Head dims between those of the kernels are padded."""
    sizes = {"K": K, "V": V, "H": 4, "Hq": 2}
    check(wide(form, dtype=DTYPE, T=200, **sizes))
    check(wide(form, dtype=DTYPE, T=333, B=1, carried=False, **sizes), chunk_size=100)
    check(wide(form, dtype=torch.float16, T=130, B=1, **sizes), chunk_size=64)
    check(wide(form, dtype=DTYPE, lengths=(0, 130, 1, 64), **sizes))
    check(wide(form, dtype=DTYPE, lengths=(65, 0, 200), carried=False, **sizes), chunk_size=64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("form", ["exp", "plain"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128)])
def test_shapes_of_small_heads(form: str, shape: dict[str, Any], K: int, V: int) -> None:
    shared = shape.get("H") != shape.get("Hq")  # a Triton kernel sums over heads that share q and k
    check(wide(form, **{"dtype": DTYPE if shared else torch.bfloat16, **shape, "K": K, "V": V}))


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 512)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=5)  # in all 100; one process would compile for minutes
@given(
    B=st.integers(1, 3), Hq=st.integers(1, 3), group=st.integers(1, 2),
    T=st.integers(1, 260), lengths=st.none() | st.lists(st.integers(0, 130), min_size=1, max_size=5).map(tuple),
    chunk_size=st.none() | st.integers(1, 200),
    carried=st.booleans(), i_mean=st.floats(-6, 3), f_mean=st.floats(-2, 9), dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_anything(form: str, B: int, Hq: int, group: int, T: int, lengths: tuple[int, ...] | None,
                  chunk_size: int | None, dims: tuple[int, int], carried: bool, i_mean: float, f_mean: float,
                  dtype: torch.dtype, seed: int) -> None:  # fmt: skip
    assume(lengths is None or sum(lengths))
    p = wide(
        form, B=B, H=Hq * group, Hq=Hq, T=T, lengths=lengths, K=dims[0], V=dims[1], carried=carried, i_mean=i_mean,
        f_mean=f_mean, dtype=dtype, seed=seed, positive_qk=True,
    )  # fmt: skip
    check(p, 4, chunk_size=chunk_size)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_it_is_the_default_and_leaves_the_rest_to_others() -> None:
    from tfla.backends import Inputs, select

    def inputs(K: int, dtype: torch.dtype) -> Inputs:
        q, v, g = (torch.zeros(1, 8, 2, *d, device="cuda") for d in ((K,), (256,), ()))
        return Inputs(q.to(dtype), q.to(dtype), v.to(dtype), g, g, None, None, None, None)

    assert select(None, inputs(128, torch.bfloat16), BACKENDS).name == "hopper"
    assert select(None, inputs(64, torch.bfloat16), BACKENDS).name == "hopper"  # padded to 128 x 256
    assert select(None, inputs(128, torch.float32), BACKENDS).name == "triton"
    for refused in (56, 100):  # less than half of a side, no multiple of 8
        assert select(None, inputs(refused, torch.bfloat16), BACKENDS).name == "triton"
        assert BACKENDS["hopper"].unsupported(inputs(refused, torch.bfloat16)) is not None
