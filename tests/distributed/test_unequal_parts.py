"""Parts that do not fit together are an error of every process, so that none waits for one that has raised."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import Pool
from torch import Tensor

import tfla
from tfla.distributed import ContextParallel
from tfla.nn import LanguageModel, ModelConfig
from tfla.ops.context_parallel import parts
from tfla.ops.context_parallel.cuts import Placement


def _operators(T: int) -> dict[str, functools.partial[Tensor]]:
    """Calls of T steps with two heads, and for delta_product with two writes in each step."""
    x, gate = torch.ones(1, T, 2, 4, dtype=torch.float64), torch.zeros(1, T, 2, dtype=torch.float64)
    k, beta = torch.ones(1, 2 * T, 2, 4, dtype=torch.float64), torch.zeros(1, 2 * T, 2, dtype=torch.float64)
    return {
        "mlstm": functools.partial(tfla.mlstm, x, x, x, gate, gate),
        "linear_attention": functools.partial(tfla.linear_attention, x, x, x, gate),
        "channel gates": functools.partial(tfla.linear_attention, x, x, x, -x),
        "delta_rule": functools.partial(tfla.delta_rule, x, x, x, gate),
        "delta_product": functools.partial(tfla.delta_product, x, k, k, beta, writes=2),
        "dplr": functools.partial(tfla.dplr, x, x, x, x, x, -x),
    }


def _refusal(
    group: dist.ProcessGroup,
    *,
    operator: str,
    parts: tuple[int, ...],
    offsets: tuple[tuple[int, ...] | None, ...],
    options: dict[str, Any],
    compiled: bool = False,
    before: tuple[int, ...] | None = None,
) -> str:
    """Return the message of the exception of this process.

    Args:
        parts: the steps of each process.
        offsets: the offsets that each process passes, or one for all.
        options: those of ContextParallel; without any the group is passed.
        compiled: the call is compiled.
        before: the steps that each process has in a good call before.
    """
    rank = dist.get_rank(group)
    call, own = _operators(parts[rank])[operator], offsets[rank % len(offsets)]
    context = ContextParallel(group, **options) if options else group
    cu_seqlens = None if own is None else torch.tensor(own)
    if before is not None:
        _operators(before[rank])[operator](context_parallel=context, cu_seqlens=cu_seqlens)
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with pytest.raises(ValueError) as refused:
        run(context_parallel=context, cu_seqlens=cu_seqlens)
    return str(refused.value)


OPERATORS = sorted(set(_operators(1)) - {"dplr"})  # which is a call of several writes as delta_product is


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("parts", [(4, 6), (4, 5, 6), (6, 4, 5, 5)])  # in the last two, some T fits all offsets
def test_packed_parts_without_lengths(pool: Pool, operator: str, parts: tuple[int, ...]) -> None:
    offsets = (0, 3, sum(parts))
    found = pool.run(len(parts), _refusal, operator=operator, parts=parts, offsets=(offsets,), options={})
    expected = (
        f"q: got {', '.join(map(str, parts))} steps on the {len(parts)} processes of context_parallel, expected as "
        "many on each: for parts of other sizes pass tfla.distributed.ContextParallel(group, order='contiguous', "
        f"lengths=...), here {parts}"
    )
    assert found == [expected] * len(parts)


def test_compiled_packed_parts_without_lengths(pool: Pool) -> None:
    given = {"parts": (4, 5, 6), "offsets": ((0, 7, 15),), "options": {}, "compiled": True}
    for message in pool.run(3, _refusal, operator="mlstm", **given):
        assert re.match(r"q: got 4, 5, 6 steps on the 3 processes .*, here \(4, 5, 6\)$", message), message


@pytest.mark.parametrize(("operator", "compiled"), [("mlstm", False), ("delta_rule", False), ("mlstm", True)])
@pytest.mark.parametrize(
    ("parts", "options", "offsets", "message"),
    [
        ((4, 5), {"order": "zigzag"}, None, "q: got 4, 5 steps .*, expected even numbers with order 'zigzag'"),
        ((4, 6), {"order": "zigzag"}, (0, 10), "q: got 4, 6 steps .* here those of all 4 spans in the order of time$"),
        ((4, 5), {"lengths": (4, 6)}, None, r"q: got 4, 5 steps .*, expected 4, 6, by its lengths \(4, 6\)$"),
        ((4, 5), {"lengths": (4, 6)}, (0, 9), r"q: got 4, 5 steps .*, expected 4, 6, by its lengths \(4, 6\)$"),
    ],
)
def test_orders_and_lengths(
    pool: Pool,
    operator: str,
    compiled: bool,
    parts: tuple[int, ...],
    options: dict[str, Any],
    offsets: Any,
    message: str,
) -> None:
    given = {"offsets": (offsets,), "options": options, "compiled": compiled}
    for found in pool.run(2, _refusal, operator=operator, parts=parts, **given):
        assert re.match(message, found), found


@pytest.mark.parametrize("options", [{"order": "zigzag"}, {"lengths": (4, 6)}])
def test_compiled_parts_that_one_process_cannot_cut(pool: Pool, options: dict[str, Any]) -> None:
    """The process that cannot trace the call compares its part with the others when its graph runs."""
    given = {"parts": (4, 5), "offsets": (None,), "options": options, "compiled": True}
    for found in pool.run(2, _refusal, operator="delta_product", **given):
        assert re.match("q: got 4, 5 steps on the 2 processes of context_parallel, expected ", found), found


@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_that_differ(pool: Pool, operator: str) -> None:
    for message in pool.run(
        3, _refusal, operator=operator, parts=(4, 4, 4), offsets=((0, 12), (0, 4), (0, 5, 12)), options={}
    ):
        assert message == (
            "cu_seqlens: got offsets that differ among the 3 processes of context_parallel (2 up to 12, 2 up to 4, "
            "3 up to 12), expected those of the whole sequence, the same on each"
        )


def test_a_process_that_knows_the_plan_of_its_call_checks_too(pool: Pool) -> None:
    """The second process makes a call as before, for which its checks are not repeated."""
    given = {"parts": (4, 6), "before": (6, 6), "offsets": ((0, 7, 12),), "options": {"lengths": (6, 6)}}
    for message in pool.run(2, _refusal, operator="mlstm", **given):
        assert re.match(r"q: got 4, 6 steps on the 2 processes .*, expected 6, 6, by its lengths \(6, 6\)$", message)


def _dense_zigzag(group: dist.ProcessGroup) -> Tensor:
    T = 2 + 2 * dist.get_rank(group)
    return _operators(T)["mlstm"](context_parallel=ContextParallel(group, order="zigzag"))


def test_dense_parts_of_zigzag_may_differ(pool: Pool) -> None:
    """Two spans of one step on the first process surround two of two steps."""
    first, second = pool.run(2, _dense_zigzag)
    whole = _operators(6)["mlstm"]()
    torch.testing.assert_close(torch.cat([first[:, :1], second, first[:, 1:]], 1), whole)


def _refusals(
    group: dist.ProcessGroup, *, operator: str, case: str, compiled: bool = False, backend: str = "aot_eager",
    dynamic: bool | None = None,
) -> str:  # fmt: skip
    """Return the message of the exception of this process; the arguments of the first one differ from the others'."""
    first, T = dist.get_rank(group) == 0, 6
    call = _operators(T)[operator]
    options: dict[str, Any] = {"context_parallel": group}
    if case == "state":
        options["initial_state"] = tfla.State(torch.zeros(2, 2, 4, 4, dtype=torch.float64))
        options["cu_seqlens"] = torch.tensor((0, 4, 6, 12) if first else (0, 4, 12))
    elif case == "offsets":
        options["cu_seqlens"] = torch.tensor([0.0, 12.0] if first else [0, 12])
    elif case == "chunk":
        options["chunk_size"] = True if first else 4
        options["return_state"] = True
    elif case == "kernel":
        options["kernel"] = "none of that name" if first else None
    elif case == "shape":
        *tensors, gate = call.args
        call = functools.partial(call.func, *tensors, gate[:, :-1] if first else gate, **call.keywords)
    elif case == "writes":
        options["writes"] = 0 if first else 2
    elif case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 12]) if first else None
    elif case == "order":
        options["context_parallel"] = ContextParallel(group, order="zigzag") if first else group
    elif case == "lengths":
        options["context_parallel"] = ContextParallel(group, lengths=(6, 6)) if first else group

    def traced(*tensors: Tensor, options: dict[str, Any]) -> Tensor:
        found = call.func(*tensors, **{**call.keywords, **options})
        return found[0] + found[1].C.sum() if isinstance(found, tuple) else found

    torch._dynamo.reset()  # calls of other cases count among the recompilations of this function
    run = torch.compile(traced, backend=backend, fullgraph=True, dynamic=dynamic) if compiled else traced
    with pytest.raises((ValueError, TypeError)) as refused:
        run(*(x.requires_grad_() for x in call.args), options=options).sum().backward()
    return str(refused.value)


OF_ANOTHER = (
    "context_parallel: got arguments that process 0 of 2 refuses, with an error that names them, expected valid ones "
    "on each"
)


REFUSED = {
    ("linear_attention", "state"): "initial_state",
    ("delta_rule", "state"): "initial_state",
    ("linear_attention", "offsets"): "cu_seqlens: got torch.float",
    ("delta_rule", "offsets"): "cu_seqlens: got torch.float",
    ("mlstm", "chunk"): "chunk_size: got ",
    ("delta_rule", "chunk"): "chunk_size: got ",
    ("mlstm", "kernel"): "kernel: got 'none of that name'",
    ("delta_rule", "kernel"): "kernel: got 'none of that name'",
    ("linear_attention", "shape"): "log_f: got shape (1, 5, 2)",
    ("delta_product", "shape"): "beta: got shape (1, 11, 2)",
    ("dplr", "shape"): "log_f: got shape (1, 5, 2, 4)",
}
COMPILED = [  # every case, and every operator
    ("linear_attention", "state"), ("delta_rule", "offsets"), ("delta_rule", "chunk"), ("mlstm", "kernel"),
    ("linear_attention", "shape"), ("delta_product", "shape"), ("dplr", "shape"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "case", "compiled"), [*((*each, False) for each in REFUSED), *((*each, True) for each in COMPILED)]
)
def test_arguments_that_one_process_refuses(pool: Pool, operator: str, case: str, compiled: bool) -> None:
    """Those of the other are valid, also with dense parts, which fit together whatever they are."""
    first, second = pool.run(2, _refusals, operator=operator, case=case, compiled=compiled)
    assert REFUSED[operator, case] in first
    assert second == OF_ANOTHER


def test_a_number_of_writes_that_one_process_refuses(pool: Pool) -> None:
    first, second = pool.run(2, _refusals, operator="delta_product", case="writes")
    assert "writes: got 0, expected at least 1" in first
    assert second == OF_ANOTHER


@pytest.mark.parametrize(
    ("operator", "options"), [("mlstm", {"dynamic": True}), ("delta_product", {"backend": "inductor"})]
)
def test_compiled_arguments_that_one_process_refuses(pool: Pool, operator: str, options: dict[str, Any]) -> None:
    """The sizes in the message may be symbols of the traced call."""
    first, second = pool.run(2, _refusals, operator=operator, case="shape", compiled=True, **options)
    assert re.match(r"(f|beta): got shape \(1, (5|11), 2\), expected \(1, (6|12), ", first), first
    assert second == OF_ANOTHER


@pytest.mark.parametrize(("operator", "compiled"), [("mlstm", False), ("delta_product", False), ("mlstm", True)])
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("packed", r"cu_seqlens: got offsets that differ among the 2 processes of .* \(3 up to 12, none\), expected"),
        ("order", r"context_parallel: got orders or lengths that differ among its 2 processes, here order='"),
        ("lengths", r"context_parallel: got orders or lengths that differ among its 2 processes, here order='"),
    ],
)
def test_layouts_of_which_one_process_has_another(
    pool: Pool, operator: str, compiled: bool, case: str, message: str
) -> None:
    for found in pool.run(2, _refusals, operator=operator, case=case, compiled=compiled):
        assert re.match(message, found), found


def _layer(group: dist.ProcessGroup, *, name: str) -> str:
    """Return the message of a layer that gets offsets on one process alone."""
    config = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=8, mixer=name)  # type: ignore[arg-type]
    layer: Any = LanguageModel(config).blocks[0].mixer
    layer.context_parallel = group
    with pytest.raises(ValueError) as refused:
        layer(torch.zeros(1, 6, 16), cu_seqlens=None if dist.get_rank(group) else torch.tensor([0, 5, 12]))
    return str(refused.value)


@pytest.mark.parametrize("name", ["mlstm_exp", "gated_delta_net", "attention"])
def test_layers_of_which_one_process_has_offsets(pool: Pool, name: str) -> None:
    for message in pool.run(2, _layer, name=name):
        assert re.match(r"cu_seqlens: got offsets that differ .* \(3 up to 12, none\)", message), message


def _own_argument(group: dist.ProcessGroup, *, name: str, compiled: bool) -> str:
    """Return the message of a layer that gets a state that it does not take on one process alone."""
    config = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=8, mixer=name)  # type: ignore[arg-type]
    layer: Any = LanguageModel(config).blocks[0].mixer
    layer.context_parallel = group
    first = dist.get_rank(group) == 0
    state = None if not first else layer.initial_state(1, torch.device("cpu")) if name == "attention" else "a state"
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with pytest.raises((TypeError, ValueError)) as refused:
        run(torch.zeros(1, 6, 16, requires_grad=True), state, cu_seqlens=torch.tensor([0, 5, 12]))
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "compiled"), [("gated_delta_net", False), ("retnet", True), ("attention", False), ("attention", True)]
)
def test_layers_of_which_one_process_refuses_its_arguments(pool: Pool, name: str, compiled: bool) -> None:
    first, second = pool.run(2, _own_argument, name=name, compiled=compiled)
    if name == "attention":
        assert first == "cu_seqlens, state: got both, expected at most one of them in attention"
    else:
        assert first == "state: got str, expected MixerState"
    assert second == OF_ANOTHER


def _compiled_layer(group: dist.ProcessGroup, *, name: str) -> str:
    """Return the message of a compiled layer that has another number of steps on each process."""
    config = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=8, mixer=name)  # type: ignore[arg-type]
    layer: Any = LanguageModel(config).blocks[0].mixer
    layer.context_parallel = group
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError) as refused:
        run(torch.zeros(1, 4 + dist.get_rank(group), 16), cu_seqlens=torch.tensor([0, 5, 9]))
    return str(refused.value)


@pytest.mark.parametrize("name", ["gated_delta_net", "attention"])
def test_compiled_layers_compare_their_parts(pool: Pool, name: str) -> None:
    for message in pool.run(2, _compiled_layer, name=name):
        assert re.match(r"x: got 4, 5 steps on the 2 processes .*, here \(4, 5\)$", message), message


def test_compiled_writes_are_counted_in_steps(pool: Pool) -> None:
    given = {"operator": "delta_product", "offsets": ((0, 3, 10),), "options": {}, "compiled": True}
    for message in pool.run(2, _refusal, parts=(4, 6), **given):
        assert re.match(r"q: got 4, 6 steps on the 2 processes .*, here \(4, 6\)$", message), message
    given |= {"offsets": (None,), "options": {"lengths": (4, 5)}}
    for message in pool.run(2, _refusal, parts=(4, 6), **given):
        assert re.match(r"q: got 4, 6 steps on the 2 processes .*, expected 4, 5, by its lengths \(4, 5\)$", message)


def test_gpus_exchange_at_the_first_call_and_the_first_with_parts_that_must_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A meta tensor stands for one on a GPU, and another process that tells the same as this one."""
    gathers: list[bool] = []

    def gather(numbers: Tensor, group: str, size: int) -> Tensor:
        gathers.append(numbers.is_meta)
        same = [0, 6, parts._layout(placement), *parts._fingerprint(offsets)]
        return torch.tensor([[same]] * size)

    monkeypatch.setattr(parts, "gather", gather)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    placement, x = Placement(0, 2, "contiguous", ()), torch.empty(1, 6, 2, 4, device="meta")
    for offsets, exchanges in ((None, 1), (None, 1), (torch.tensor([0, 12]), 2), (torch.tensor([0, 12]), 2), (None, 2)):
        parts.check_parts(placement, "a group of two", x, offsets)
        assert gathers == [True] * exchanges
