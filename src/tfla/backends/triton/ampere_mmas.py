"""The MMAs of Ampere for kernels that ptxas compiles wrongly with those of Hopper."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NO_WGMMA = "DISABLE_MMA_V3"  # Triton reads this environment variable as it compiles; it is part of its cache's keys


@contextlib.contextmanager
def ampere_mmas() -> Iterator[None]:
    """Compile what is launched in the body of a `with` statement without wgmma.

    ptxas 12.8 and 12.9 leave matrix descriptors of some kernels unset, mostly of those with many products in loops;
    wgmma then reads shared memory at addresses that do not exist. The MMAs of Ampere have no descriptors.
    """
    before = os.environ.get(NO_WGMMA)
    os.environ[NO_WGMMA] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_WGMMA]
        else:
            os.environ[NO_WGMMA] = before
