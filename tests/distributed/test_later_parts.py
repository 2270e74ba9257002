"""Parts that do not fit in a later call on a GPU, for which a CPU stands: a device-side assertion of every process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_pool import Pool

import tfla
from tfla.distributed import ContextParallel
from tfla.nn import LanguageModel, ModelConfig
from tfla.ops.context_parallel import parts

X, GATE = torch.ones(1, 6, 2, 4, dtype=torch.float64), torch.zeros(1, 6, 2, dtype=torch.float64)


def _call(name: str, context: Any, offsets: tuple[int, ...] | None, T: int = 6, **options: Any) -> Any:
    """Make a call of an operator, or of a layer, and return its output."""
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    if name == "mlstm":
        given = (*[X[:, :T]] * 3, *[GATE[:, :T]] * 2)
        return tfla.mlstm(*given, context_parallel=context, cu_seqlens=cu_seqlens, **options)
    if name == "delta_rule":
        given = (*[X[:, :T]] * 3, GATE[:, :T])
        return tfla.delta_rule(*given, context_parallel=context, cu_seqlens=cu_seqlens, **options)
    config = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=8, mixer=name)  # type: ignore[arg-type]
    layer: Any = LanguageModel(config).blocks[0].mixer
    layer.context_parallel = context
    return layer(torch.zeros(1, T, 16), cu_seqlens=cu_seqlens, **options)


def _later(group: dist.ProcessGroup, *, name: str, case: str) -> list[str]:
    """Return the messages of a good call, of one in which the first process has another layout, and of a good one."""
    first = dist.get_rank(group) == 0
    good = (0, 5, 12)
    context: Any = group
    changed: dict[str, Any] = {"context": group, "offsets": good}
    if case == "offsets":
        changed["offsets"] = (0, 4, 12)
    elif case == "sequences":
        changed |= {"offsets": (0, 4, 5, 12), "return_state": True}
    elif case == "one sequence":
        changed["offsets"] = (0, 12)
    elif case == "dense":
        changed["offsets"] = None
    elif case == "lengths":
        changed |= {"context": ContextParallel(group, lengths=(6, 6))}
    elif case == "steps":
        changed["T"] = 4
    else:
        changed["initial_state"] = "a state"
    found = []
    _forget()
    with mock.patch.object(parts, "_host_waits", return_value=False):
        for wrong in (False, True, False):
            own = changed if wrong and first else {"context": context, "offsets": good}
            if case == "sequences":
                own = {**own, "return_state": True}
            found.append(_message(_call, name, own.pop("context"), own.pop("offsets"), **own))
    _forget()
    return found


def _message(call: Any, *args: Any, **options: Any) -> str:
    """Return the message of the error of a call, or "good"."""
    try:
        call(*args, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "good"


def _forget() -> None:
    """Let the next call of each group be its first one."""
    for groups in (parts._MET, parts._CHECKED, parts._PACKED):
        groups.clear()


OPERATORS = ("mlstm", "delta_rule")
CASES = [
    *[(name, case) for name in OPERATORS for case in ("offsets", "sequences", "one sequence", "dense", "lengths")],
    *[(name, case) for name in OPERATORS for case in ("steps", "refused")],
    *[(name, case) for name in ("gated_delta_net", "attention") for case in ("offsets", "dense", "steps")],
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_process_raises(pool: Pool, name: str, case: str) -> None:
    first, second = pool.run(2, _later, name=name, case=case)
    assert parts.MISMATCH in second[1]
    assert parts.MISMATCH in first[1] or (case == "refused" and "initial_state: got str" in first[1])
    assert [first[0], first[2], second[0], second[2]] == ["good"] * 4


def _compiled(group: dist.ProcessGroup) -> list[str]:
    """Return the messages of a compiled call as :func:`_later` does, with offsets that differ in the second one."""
    _forget()
    run = torch.compile(tfla.mlstm, backend="aot_eager", fullgraph=True)
    with mock.patch.object(parts, "_host_waits", return_value=False):
        found = [
            _message(run, X, X, X, GATE, GATE, context_parallel=group, cu_seqlens=torch.tensor(offsets))
            for offsets in ((0, 5, 12), (0, 4 + dist.get_rank(group), 12), (0, 5, 12))
        ]
    _forget()
    return found


def test_compiled_calls(pool: Pool) -> None:
    for before, message, after in pool.run(2, _compiled):
        assert parts.MISMATCH in message
        assert before == after == "good"


def test_dense_calls_exchange_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group without packed sequences."""
    monkeypatch.setattr(parts, "_host_waits", lambda x: False)
    monkeypatch.setattr(parts, "_MET", {"a group"})
    monkeypatch.setattr(parts.exchange, "gather", lambda *_: pytest.fail("numbers were exchanged"))
    parts.check_parts(parts.Placement(0, 2, "contiguous", ()), "a group", X, None)
