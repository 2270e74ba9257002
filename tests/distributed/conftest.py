"""The pool of processes of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from process_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()
