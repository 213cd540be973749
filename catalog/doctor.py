"""``catalog doctor``: what is set, what is there, what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from catalog.errors import CatalogError
from catalog.settings import Settings, data_dir, settings


class Finding(NamedTuple):
    """One line: what it is about, its value, and a remark."""

    what: str
    value: str
    about: str


def diagnose(db: Path) -> Iterator[Finding]:
    """Settings, the catalog file at ``db``, and the toolchain of every arch."""
    yield from _settings()
    yield from _file(db)
    yield from about_cache()
    yield _checkout()
    yield from _gpus()
    yield from _arches()


def _settings() -> Iterator[Finding]:
    current = settings()
    for name, field in Settings.model_fields.items():
        value = getattr(current, name)
        yield Finding(f"CATALOG_{name.upper()}", "" if value is None else str(value), field.description or "")


def _file(db: Path) -> Iterator[Finding]:
    from catalog.registry import connect

    if not db.is_file():
        yield Finding("catalog", "not there yet", f"{db}: catalog populate --arch ARCH makes it")
        return
    try:
        connection = connect(db)
    except CatalogError as error:
        yield Finding("catalog", "unusable", str(error))
        return
    rows = connection.execute("SELECT arch, revision, space, mask_impl, kernels FROM population ORDER BY 1, 2, 3, 4")
    populations = [f"{row[0]} ({row[1]}, {row[2]}, {row[3]}): {row[4]:,}" for row in rows]
    connection.close()
    yield Finding("catalog", f"{db.stat().st_size / 1e6:.1f} MB", "; ".join(populations) or "empty")


def about_cache() -> Iterator[Finding]:
    """The cache folder, what it lies on, and how builders lock it."""
    from catalog.build.cache import Cache
    from catalog.build.locks import STRATEGIES
    from catalog.build.trust import require_private

    cache = Cache(settings().cache_dir)
    state = "made by the first build"
    if cache.folder.is_dir():
        try:
            require_private(cache.folder)
            state = "private" if os.access(cache.folder, os.W_OK) else "cannot be written: serves what it has"
        except CatalogError as error:
            state = error.message
    yield Finding("cache", str(cache.folder), state)
    shared = "shared by machines" if cache.locks.file_system.network else "of this machine"
    yield Finding("cache file system", cache.locks.file_system.type or "unknown", shared)
    yield Finding("cache locks", cache.locks.strategy, STRATEGIES[cache.locks.strategy])


def _checkout() -> Finding:
    from catalog.build.ck.sources import find_checkout

    try:
        checkout = find_checkout()
    except CatalogError as error:
        return Finding("CK checkout", "none", str(error))
    generator = checkout.generator
    about = f"like revision {generator.revision}; APIs {', '.join(generator.apis)}"
    return Finding("CK checkout", str(generator.path), about)


def _gpus() -> Iterator[Finding]:
    from catalog.runtime.devices.cuda_runtime import CudaRuntime
    from catalog.runtime.devices.hip_runtime import HipRuntime

    for runtime in (HipRuntime(), CudaRuntime()):
        what = f"{runtime.vendor.company} GPUs"
        try:
            names = [f"{gpu.info.name} ({gpu.info.arch})" for gpu in runtime.gpus]
            yield Finding(what, ", ".join(names), f"{runtime.vendor.runtime} runtime {runtime.version}")
        except CatalogError as error:
            yield Finding(what, "none", str(error))


def _arches() -> Iterator[Finding]:
    from catalog.build import toolchains
    from catalog.build.ck import toolchain as hip
    from catalog.build.cuda import toolchain as cuda
    from catalog.runtime.devices import why_unavailable
    from catalog.schema.spec_files import known_archs

    diagnoses = {diagnosis.arch: diagnosis for diagnosis in (*toolchains.doctor(), *hip.doctor(), *cuda.doctor())}
    for arch in known_archs(data_dir() / "arch_specs"):
        diagnosis = diagnoses.get(arch)
        reason = why_unavailable(arch)
        runs = "runs here" if reason is None else f"does not run here: {reason}"
        if diagnosis is None:
            yield Finding(arch, "no toolchain", f"this version does not compile for it; {runs}")
        elif diagnosis.compiler is None or diagnosis.missing is not None:
            yield Finding(arch, "no toolchain", f"{diagnosis.missing}; {runs}")
        else:
            yield Finding(arch, str(diagnosis.compiler.path), f"{diagnosis.compiler.title}; {runs}")
