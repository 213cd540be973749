"""AMX on CPUs without it: kernels compiled with the tiles of ``amx_emulated.hpp``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from catalog.runtime.devices.host import device as host_device
from catalog.settings import settings

TILES = frozenset({"amx_bf16", "amx_int8", "amx_tile"})

PAIRS = {
    "host_panel": frozenset[str](),
    "host_bf16": frozenset({"avx512_bf16"}),
    "host_amx": TILES | {"avx512_bf16"},
}
"""Pipelines for bf16 on x86_64_v4, and the features with which each is the first."""

EMULATED = Path(__file__).with_name("amx_emulated.hpp")


HALVES = (False, True)
"""Whether a CPU with AMX multiplies fp16 in tiles, AMX-FP16, or bf16 only."""


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this CPU one without AMX."""
    others = host_device.cpu_features() - TILES
    monkeypatch.setattr(host_device, "cpu_features", lambda: others)


def pretend(pipeline: str, folder: Path, monkeypatch: pytest.MonkeyPatch, halves: bool = False) -> None:
    """Make this CPU one for which ``pipeline`` is the first; AMX tiles are computed in software.

    ``halves``: with AMX-FP16.
    """
    if halves:
        monkeypatch.setenv("CATALOG_TEST_AMX_FP16", "1")
    monkeypatch.setattr(host_device, "cpu_features", lambda: PAIRS[pipeline])
    if pipeline == "host_amx":
        compiler = folder / "g++"
        compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -include {EMULATED} "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CATALOG_CXX", str(compiler))
        settings.cache_clear()
