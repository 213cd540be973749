"""A stand-in for a machine with CUDA, and a catalog whose kernels run on it: parts of fixtures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import leaves_nothing
from fake_cuda import FakeCuda
from fake_gpu import target

from catalog.build.builder import Builder
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.cuda import driver as cuda_driver
from catalog.runtime.here import Devices
from catalog.schema.kernel import Kernel

ONE_KEY = Problem(batch=2, nhead_q=4, nhead_k=2, seqlen_q=1, seqlen_k=1, hdim_q=128, dtype="fp16")
"""Its O is V: the stand-in computes it right."""


def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The fake runtime, on a machine that has a driver; a test leaves nothing."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", fake)
    monkeypatch.setattr(cuda_driver, "_DRIVER", (folder,))
    monkeypatch.setattr(cuda_driver, "_has_bindings", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with leaves_nothing(lambda: fake.live):
        yield fake


def catalog_on(folder: Path) -> Iterator[Catalog]:
    """The catalog ``catalog.db`` in ``folder``, whose kernels the stand-in runs."""
    catalog = Catalog(folder / "catalog.db")
    catalog.builds.builder = Builder(folder / "cache", targets=lambda _arch: target())
    yield catalog
    catalog.close()
    # pytest keeps the catalog for longer than the runtime's memory may live
    catalog._devices = catalog._planners.devices = Devices(None)


def best(catalog: Catalog, count: int) -> list[Kernel]:
    return [candidate.kernel for candidate in catalog.candidates(ONE_KEY, arch="sm_90", limit=count)]
