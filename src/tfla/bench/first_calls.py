"""The benchmark of the first calls of an operator in a new process with an empty cache of Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

from tfla.measure.problem import Problem, Work
from tfla.ops.warmup import Form, arguments_of

# `tfla.warmup` in a process of its own; its calls are a forward, a forward with a backward, and a step.
CODE = """
import json, sys
import torch, tfla
given = json.loads(sys.argv[1])
given["dtype"] = getattr(torch, given["dtype"])
done = tfla.warmup(*given.pop("sizes"), **given)
print(json.dumps([[call.seconds, len(call.kernels)] for call in done.calls]))
"""


def operator(problem: Problem, form: Form) -> Work:
    """Return a call of an operator with the arguments of a mixer, and how long first calls take in a new process.

    Args:
        problem: its sizes, dtype and device.
        form: the mixer, as :func:`tfla.warmup` has it.
    """
    dtype, device = getattr(torch, problem.dtype), torch.device(problem.device)
    sizes = query_heads(problem, form), problem.H, problem.dqk, problem.dhv
    call, given = arguments_of(form, (problem.B, problem.T), sizes, dtype, dtype, device)
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    return Work(
        lambda *tensors: call(**(given | dict(zip(names, tensors, strict=True)))), [given[name] for name in names],
        {"first_calls": first_calls(problem, form)},
    )  # fmt: skip


def query_heads(problem: Problem, form: Form) -> int:
    """Return the heads of queries and keys: Mamba-2 has one for all heads of values."""
    return 1 if form == "mamba2" else problem.H


def first_calls(problem: Problem, form: Form) -> list[dict[str, Any]]:
    """Return the seconds of the first forward, of the first with a backward, and of the first step, in that order.

    They are those of a new process with an empty cache of Triton, each with the number of kernels that it compiled.
    The device is initialized before. On a CPU there are none, since nothing is compiled.
    """
    sizes = [problem.B, problem.T, problem.H, problem.dqk, problem.dhv]
    given: dict[str, Any] = {
        "form": form,
        "Hq": query_heads(problem, form),
        "dtype": problem.dtype,
        "device": problem.device,
    }
    given["sizes"] = sizes
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", CODE, json.dumps(given)], env=os.environ | {"TRITON_CACHE_DIR": cache},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return [{"seconds": seconds, "kernels": kernels} for seconds, kernels in json.loads(done.stdout)]
