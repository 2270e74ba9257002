"""The fixtures of the operator's tests, and the settings of hypothesis."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import gpus  # noqa: F401
import pytest
import torch
from cases import DEVICES, INTERPRETED, Implementation, implementations
from compiling import cache_name
from garbage import collect_seldom
from hypothesis import HealthCheck, settings

EXAMPLES = 3 if INTERPRETED else 30  # a simulated GPU takes a second a call
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=EXAMPLES, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


collect_seldom()
torch.set_num_threads(1)  # for small problems one thread is faster than two that wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


if INTERPRETED:  # torch.empty fills what it allocates with NaN: a kernel that reads what none has written shows it
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of later collections of garbage."""
    collect_seldom()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start every test alike, whichever tests this process ran before: random numbers and compiled functions."""
    random.seed(31)
    torch.manual_seed(31)
    if "torch._dynamo" in sys.modules:  # it compiles a function at most eight times
        torch.compiler.reset()


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Let Triton's interpreter, where it is on, take less time."""
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        yield
        return
    from quick_interpreter import use_quick_interpreter

    with pytest.MonkeyPatch.context() as patch:
        use_quick_interpreter(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_tuned_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide what `tfla tune` has found for the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFLA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def on(device: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if device == "cuda" else []


def tested() -> list[Implementation]:
    return (
        [implementation for implementation in implementations() if implementation.interpreted]
        if INTERPRETED
        else implementations()
    )


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(implementation, id=str(implementation), marks=on(implementation.device))
        for implementation in tested()
    ],
)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Every implementation of the operator; under Triton's interpreter those that run in it."""
    return request.param


@pytest.fixture(scope="session", params=[pytest.param(device, marks=on(device)) for device in DEVICES])
def device(request: pytest.FixtureRequest) -> str:
    """Every device, for what does not depend on the backend."""
    return request.param


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels: one for all tests that compile for absent GPUs, kept from run to run."""
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return cache.mkdir(cache_name()) if cache else tmp_path_factory.mktemp("kernels")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests hand over as a property, from whatever process."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    tables = [str(text) for report in reports for name, text in report.user_properties if name == "table"]
    if tables:
        terminalreporter.section("registers/bytes spilled/bytes of shared memory")
        terminalreporter.write_line("\n".join(tables))
