"""Calls over whole sequences whose states are rows of a pool, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import problem
from delta_cases import delta_problem
from several_writes import writes_problem

import tfla

Call = Callable[..., Any]
ROWS, INDICES = 7, (5, -1, 0, 3)  # of the pool, and those of the sequences
DELTA_FORMS = ("gdn", "kda", "gla")
SEVERAL_WRITES = ("delta_product", "dplr")


def prefill(form: str, device: str, dtype: torch.dtype = torch.float32, dense: bool = False) -> tuple[Call, tfla.State]:
    """A call over two packed sequences, of 20 steps and of none, and over two more, and a pool of states.

    With `dense` it is a call over a batch of four sequences.
    """
    offsets = None if dense else torch.tensor([0, 20, 20, 31, 37], device=device)
    more: dict[str, Any] = {}
    if form in SEVERAL_WRITES:
        several = writes_problem(form, B=1, T=37, Hq=1, carried=False, by_channel=form == "dplr", dtype=torch.float32)
        x = {name: several.flat(name, t).to(device) for name, t in several.leaves.items()}
        fn: Call = getattr(tfla, form)
        more = {"writes": 2} if form == "delta_product" else {}
    elif form in DELTA_FORMS:
        p: Any = delta_problem(form, B=1, T=37, H=2, Hq=1, dtype=torch.float32)
        x = {name: t.to(device) for name, t in p.leaves.items() if name != "C"}
        fn = tfla.linear_attention if form == "gla" else tfla.delta_rule
        more = {"log_f": x.pop("log_f")} if form == "gla" else {}
        x = {name: x[name] for name in "qkv"} if form == "gla" else x
    else:
        p = problem(form, B=1, T=37, H=2, Hq=1, dtype=torch.float32)
        x, more = {name: getattr(p, name).to(device) for name in "qkvif"}, {"input_gate": form}
        fn = tfla.mlstm
    x = {name: t.to(dtype) for name, t in x.items()}
    if dense:
        x = {name: t[:, : t.shape[1] // 37 * 36].unflatten(1, (4, -1))[0] for name, t in x.items()}
        more = {name: t[:, :36].unflatten(1, (4, -1))[0] if name == "log_f" else t for name, t in more.items()}
    generator = torch.Generator().manual_seed(0)
    K, V = x["q"].shape[-1], x["v"].shape[-1]
    parts = (torch.randn(ROWS, 2, *d, generator=generator).to(device) for d in ((K, V), (K,), ()))
    C, n, m = parts
    pool = tfla.State(C, n, m) if form == "exp" else tfla.State(C)

    def call(state: tfla.State, **given: Any) -> Any:
        with torch.no_grad():
            return fn(**x, **more, initial_state=state, cu_seqlens=offsets, **given)

    return call, pool


def same(a: tfla.State, b: tfla.State) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
