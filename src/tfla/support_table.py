"""The page of `tfla support`: what is supported where, derived from the code without a GPU or any computation."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tfla._util.markdown import table
from tfla.backends import BACKENDS, DELTA_BACKENDS, DeltaInputs, DeltaStepInputs, Inputs, StepInputs

USAGE = "usage: tfla support\n\nWhat is supported where, as Markdown: backends by GPU, and other libraries' functions."
WHERE: dict[str, tuple[str, tuple[int, int]]] = {
    "CPU": ("cpu", (0, 0)),
    "before Ampere": ("cuda", (7, 5)),
    "Ampere, Ada": ("cuda", (8, 0)),
    "Hopper": ("cuda", (9, 0)),
    "Blackwell": ("cuda", (10, 0)),
}
INTEGRATIONS = ("mamba", "fla")
B, T, H = 2, 64, 4


def inputs(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    dqk: int = 128,
    dhv: int = 256,
    Hq: int = H,
    packed: bool = False,
    carried: bool = False,
    steps: int = T,
) -> Inputs:
    """Return the inputs of a call of these sizes."""
    rows = 1 if packed else B

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    q, k, v = (new(rows, steps, h, d, dtype=dtype) for h, d in ((Hq, dqk), (Hq, dqk), (H, dhv)))
    i, f = new(rows, steps, H), new(rows, steps, H)
    C, n, m = (new(B, H, dqk, dhv), new(B, H, dqk), new(B, H)) if carried else (None, None, None)
    return Inputs(q, k, v, i, f, C, n, m, new(B + 1, dtype=torch.int32) if packed else None)


CALLS: dict[str, dict[str, Any]] = {
    "bfloat16, dqk 128, dhv 256": {},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "dqk 64, dhv 64": {"dqk": 64, "dhv": 64},
    "dqk 128, dhv 128": {"dhv": 128},
    "dqk 256, dhv 512": {"dqk": 256, "dhv": 512},
    "dqk 100, dhv 36": {"dqk": 100, "dhv": 36},
    "dqk 1024, dhv 2048": {"dqk": 1024, "dhv": 2048},
    "fewer heads of q and k": {"Hq": 2},
    "packed sequences": {"packed": True},
    "from a state, to a state": {"carried": True},
}


def _for_sequences(x: Inputs) -> Callable[[Any], str | None]:
    """Return a function that says why a backend does not support a call on sequences."""
    return lambda backend: backend.unsupported(x)


def _for_steps(x: Inputs) -> Callable[[Any], str | None]:
    """Return a function that says why a backend does not support a decoding step."""
    q, k, v, i, f, C, n, m, _ = x
    assert C is not None
    return lambda backend: backend.steps_unsupported(StepInputs(q, k, v, i, f, C, n, m, None))


def _names(why_not: Callable[[Any], str | None]) -> str:
    """Return the backends that support a call, the preferred one first; the reference backend supports every call."""
    able = [b.name for b in BACKENDS.values() if b.name != "reference" and why_not(b) is None]
    return ", ".join(able) if able else "plain PyTorch"


def _names_of_delta(device: str, by_channel: bool) -> str:
    """Return the backends that support the delta rule, the preferred one first."""
    heads = (1, 128, 8)
    q = torch.empty(*heads, 128, dtype=torch.bfloat16, device=device)
    beta, log_f = torch.empty(heads, device=device), torch.empty(*heads, *[128] * by_channel, device=device)
    x = DeltaInputs(q, q, q, beta, log_f, None, None, None, None, None)
    return ", ".join(b.name for b in DELTA_BACKENDS.values() if b.name != "reference" and b.unsupported(x) is None)


def _names_of_delta_steps(device: str) -> str:
    """Return the backends with a kernel for decoding steps of the delta rule, whatever its gates are."""
    q = torch.empty(1, 1, 8, 128, dtype=torch.bfloat16, device=device)
    beta, log_f = torch.empty(1, 1, 8, device=device), torch.empty(1, 1, 8, 128, device=device)
    C = torch.empty(1, 8, 128, 128, device=device)
    x = DeltaStepInputs(q, q, q, beta, log_f, None, None, None, C, None)
    able = [b.name for b in DELTA_BACKENDS.values() if b.steps_unsupported(x) is None]
    return ", ".join(able) if able else "plain PyTorch"


def backends_table() -> str:
    """Return the table of backends by kind of call and device."""
    columns = []
    for device, capability in WHERE.values():
        with FakeTensorMode(), mock.patch.object(torch.cuda, "get_device_capability", lambda *_, c=capability: c):
            cells = [_names(_for_sequences(inputs(device, **call))) for call in CALLS.values()]
            cells.append(_names(_for_steps(inputs(device, carried=True, steps=1))))
            cells += [_names_of_delta(device, by_channel) for by_channel in (False, True)]
            columns.append([*cells, _names_of_delta_steps(device)])
    delta = "delta rule", "delta rule or GLA, gates by channel", "decoding steps of both"
    rows = zip([*CALLS, "decoding steps", *delta], *columns, strict=True)
    return table(["", *WHERE], [list(row) for row in rows])


def _says(function: Callable[..., Any]) -> str:
    """Return the object of "Compute ..." in the first sentence of a function's docstring."""
    text = " ".join(re.sub(r":func:`(\w+)`", r"`\1`", inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.partition("; as ``")[0].partition(". ")[0].rstrip(".").removeprefix("Compute ").replace("|", "/")


def functions_table(module: str) -> str:
    """Return the table of an integration's public functions, with their arguments for states and packed sequences."""
    found = importlib.import_module(f"tfla.integrations.{module}")
    rows = []
    for name in found.__all__:
        function = getattr(found, name)
        arguments = inspect.signature(function).parameters
        if not arguments:  # patch and restore
            continue
        states = [a for a in arguments if "state" in a and not {"indices", "intermediate", "disable"} & {*a.split("_")}]
        packed = [a for a in ("cu_seqlens", "seq_idx") if a in arguments]
        cells = (", ".join(f"`{a}`" for a in names) or "-" for names in (states, packed))
        rows.append([f"`{name}`", _says(function), *cells])
    return table([f"`tfla.integrations.{module}`", "computes", "states", "packed sequences"], rows)


def kernels_table() -> str:
    """Return the table of the kernel names of mlstm_kernels."""
    from tfla.integrations.mlstm_kernels.kernels import KERNELS, SEQUENCE_KERNELS, STEP_KERNELS

    rows = [
        [f"`{getter}`", f"`{name}`", _says(function)]
        for getter, kernels in (
            ("get_mlstm_kernel", KERNELS), ("get_mlstm_step_kernel", STEP_KERNELS),
            ("get_mlstm_sequence_kernel", SEQUENCE_KERNELS),
        )
        for name, function in kernels.items()
    ]  # fmt: skip
    return table(["`tfla.integrations.mlstm_kernels`", "name", "computes"], rows)


def page() -> str:
    """Return the content of docs/support.md."""
    return "\n\n".join(
        [
            "# What is supported where",
            "Written by `tfla support`, from the code.",
            "## Backends",
            "Which backends take a call, the one that `backend=None` prefers first; `reference` takes every call. Both "
            "input gates go with all. `print(tfla.explain(…))` says for one call why others are not taken. The backend "
            "`triton` needs Triton 3.4 or newer, `hopper` 3.6 or newer; with an earlier one `triton` takes its calls. "
            "Tests compile the kernels with Triton 3.4, 3.6, 3.7.1 and 3.9; what GPUs have measured is of 3.6. With "
            "3.9 the kernel for the gradients of KDA on Hopper spills more than its test allows "
            "([hopper-channels.md](hopper-channels.md#gradients-channel_gradientspy)).",
            backends_table(),
            "## Other libraries' interfaces",
            "Gradients of all inputs, states included; dtypes and devices are those of the backends. "
            "[transformers.md](transformers.md), [mlstm_kernels.md](mlstm_kernels.md), [fla.md](fla.md) and "
            "[mamba.md](mamba.md) say how they are used and what differs.",
            kernels_table(),
            *(functions_table(module) for module in INTEGRATIONS),
        ]
    )  # fmt: skip


def support(args: Sequence[str]) -> int:
    """Print the page; return the exit code."""
    if args and args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if args:
        print(f"tfla support: error: got {args[0]!r}, expected no argument", file=sys.stderr)
        return 2
    print(page())
    return 0
