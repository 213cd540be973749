"""What the tests on a real GPU share: make test-cuda."""

from __future__ import annotations

import pytest

from catalog.runtime.devices import why_unavailable

ARCH = "sm_90"


def need_gpu() -> None:
    """Skip the module where there is none."""
    reason = why_unavailable(ARCH)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)
