"""The compilation of what calls of the operators need, before the first of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tfla._util.device import check_device
from tfla._util.warm_calls import Warmup, compiles, measured
from tfla.ops.api import linear_attention, mlstm
from tfla.ops.checks import check_flags
from tfla.ops.delta import delta_rule
from tfla.ops.delta_steps import delta_rule_step
from tfla.ops.state import State
from tfla.ops.steps import linear_attention_step, mlstm_step

# What the mixers of tfla.nn compute, by their names.
Form = Literal["mlstm_exp", "mlstm_sig", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net", "kda"]
FORMS: tuple[str, ...] = get_args(Form)
OPTIONS_OF_STEPS = ("scale", "backend")


def warmup(
    B: int,
    T: int,
    H: int,
    dqk: int,
    dhv: int,
    *,
    form: Form = "mlstm_exp",
    Hq: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backward: bool = True,
    step: bool = True,
    **options: Any,
) -> Warmup:
    """Compile what calls of an operator need: a forward that returns the state, a backward, and a decoding step.

    Triton compiles a kernel at its first launch, which takes seconds, and keeps it on the disk for later processes. The
    calls have the arguments that the mixer of that name in :mod:`tfla.nn` gives them. Kernels of other lengths are
    mostly the same; segments are chosen by length. On a CPU there is nothing to compile, and
    one step is computed, in which arguments that do not fit are found.

    Args:
        B, T, H, dqk, dhv: sequences, steps, heads, and the head dims of keys and values.
        form: the mixer: "mlstm_exp", "mlstm_sig", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net" or "kda".
        Hq: heads of queries and keys; None is H.
        dtype: that of q, k and v.
        param_dtype: that of A_log and dt_bias, which Gated DeltaNet and KDA have; None is ``dtype``, as in a model that
            is loaded in it. Weights that are trained under autocast are float32.
        device: the device; None is a GPU if there is one.
        backward: whether to make a call with a backward.
        step: whether to make a decoding step of B sequences.
        options: further arguments of the operator over whole sequences, such as chunk_size; the step takes scale and
            backend of them.

    Returns:
        what was compiled, and how long the first and the second of each of these calls took.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was given and what is allowed.
    """
    for name, size in (("B", B), ("T", T), ("H", H), ("dqk", dqk), ("dhv", dhv), ("Hq", H if Hq is None else Hq)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: got {type(size).__name__}, expected an int")
        if size < 1:
            raise ValueError(f"{name}: got {size}, expected at least 1")
    if form not in FORMS:
        raise ValueError(f"form: got {form!r}, expected one of {', '.join(FORMS)}")
    for name, kind in (("dtype", dtype), ("param_dtype", param_dtype)):
        if not isinstance(kind, torch.dtype) and (name == "dtype" or kind is not None):
            raise TypeError(f"{name}: got {kind!r}, expected a torch.dtype")
    check_flags(backward=backward, step=step)
    at = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def inputs(*leading: int) -> tuple[Callable[..., Any], dict[str, Any]]:
        return arguments_of(form, leading, (H if Hq is None else Hq, H, dqk, dhv), dtype, param_dtype or dtype, at)

    if not compiles(at):
        operator, given = inputs(1, 1)  # whose arguments are checked all the same
        _forward(operator, given | options)()
        return Warmup(at.type, ())
    operator, given = inputs(B, T)
    calls = [measured(f"a forward of {B} x {T} steps", _forward(operator, given | options), at)]
    if backward:
        name = f"a forward and a backward of {B} x {T} steps"
        calls.append(measured(name, _backward(operator, given | options), at))
    if step:
        operator, given = inputs(B)
        given |= {name: options[name] for name in OPTIONS_OF_STEPS if name in options}
        given["state"] = State.zeros(B, H, dqk, dhv, normalize=form == "mlstm_exp", device=at)
        calls.append(measured(f"a step of {B} sequences", _forward(operator, given), at))
    return Warmup(at.type, tuple(calls))


def arguments_of(
    form: str,
    leading: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return an operator and its arguments, for one step if there is one leading dimension.

    Args:
        form: the mixer.
        leading: (B, T) or (B,).
        sizes: Hq, H, dqk and dhv.
        dtype: that of q, k and v.
        param_dtype: that of A_log and dt_bias.
        device: the device.
    """
    Hq, H, dqk, dhv = sizes

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    q, k, v = (ones(*leading, heads, d, dtype=dtype) for heads, d in ((Hq, dqk), (Hq, dqk), (H, dhv)))
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    gate, whole = -ones(*leading, H), len(leading) == 2
    if form in ("mlstm_exp", "mlstm_sig"):
        given |= {"i": gate, "f": gate, "input_gate": "exp" if form == "mlstm_exp" else "sigmoid"}
        return mlstm if whole else mlstm_step, given
    if form in ("mamba2", "retnet", "gla"):
        given["log_f"] = -ones(*leading, H, dqk) if form == "gla" else gate
        if form == "mamba2":
            given |= {"log_i": gate, "scale": 1.0}
        return linear_attention if whole else linear_attention_step, given
    given |= {"beta": gate.to(dtype), "normalize_qk": True, "beta_activation": "sigmoid"}
    if form != "delta_net":
        channels = (H, dqk) if form == "kda" else (H,)
        given |= {"log_f": -ones(*leading, *channels, dtype=dtype), "gate_activation": "softplus"}
        given |= {"A_log": ones(H, dtype=param_dtype), "dt_bias": ones(*channels, dtype=param_dtype)}
    return delta_rule if whole else delta_rule_step, given


def _forward(operator: Callable[..., Any], given: dict[str, Any]) -> Callable[[], object]:
    """Return a call without gradients, which returns a state as prefills do."""
    options = {} if "state" in given else {"return_state": True}

    @torch.no_grad()
    def call() -> object:
        return operator(**given | options)

    return call


def _backward(operator: Callable[..., Any], given: dict[str, Any]) -> Callable[[], object]:
    """Return a call and its backward for all tensors."""
    options = {"return_state": True} if given.get("states_every") is not None else {}

    @torch.enable_grad()
    def call() -> object:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items() if _is_leaf(t)}
        found = operator(**options | given | leaves)
        h = found[0] if isinstance(found, tuple) else found
        return torch.autograd.grad(h, list(leaves.values()), torch.ones_like(h))

    return call


def _is_leaf(value: object) -> bool:
    """Return whether an argument is a tensor that has a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()
