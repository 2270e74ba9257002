"""The earlier names of packages, which can be imported with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("old", "new"), [("tfla.analysis", "tfla.paper"), ("tfla.experiments", "tfla.paper.experiments")]
)
def test_earlier_names(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
