"""``catalog doctor``: reports settings, the catalog file, the cache, devices and toolchains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from catalog.errors import BackendError, CatalogError
from catalog.messages import counted, without_password
from catalog.settings import Settings, settings

if TYPE_CHECKING:
    from catalog.build.trials import Trials
    from catalog.ops.protocol import Extension, Operation
    from catalog.plugins import Plugin


class Finding(NamedTuple):
    """One line of the report: its subject, its value, and a remark."""

    what: str
    value: str
    about: str


def diagnose(db: Path) -> Iterator[Finding]:
    """Yield findings about settings, the catalog file at ``db``, the cache, plugins, devices and toolchains."""
    yield from _settings()
    yield from _file(db)
    yield from about_cache()
    yield _checkout()
    yield from about_plugins()
    yield about_cpu()
    yield from _gpus()
    yield from _arches()


def forget_trials() -> None:
    """Forget which compilers work, so that :func:`diagnose` tries all of them again.

    Raises:
        CacheError: the cache folder cannot be written, or others have access to it.
    """
    _trials().forget()


def _settings() -> Iterator[Finding]:
    current = settings()
    for name, field in Settings.model_fields.items():
        value = getattr(current, name)
        yield Finding(
            f"CATALOG_{name.upper()}", "" if value is None else without_password(str(value)), field.description or ""
        )


def _file(db: Path) -> Iterator[Finding]:
    from catalog.registry.connection import connect
    from catalog.schema.lineage import LINEAGE_OF_POPULATION

    if not db.is_file():
        yield Finding("catalog", "does not exist yet", f"{db}: catalog populate --arch ARCH creates it")
        return
    try:
        connection = connect(db)
    except CatalogError as error:
        yield Finding("catalog", "unusable", error.line)
        return
    rows = connection.execute(
        f"SELECT arch, revision, space, variant, kernels FROM {LINEAGE_OF_POPULATION} ORDER BY operation, 1, 2, 3, 4"
    )
    populations = [f"{row[0]} ({row[1]}, {row[2]}, {row[3]}): {row[4]:,}" for row in rows]
    connection.close()
    yield Finding("catalog", f"{db.stat().st_size / 1e6:.1f} MB", "; ".join(populations) or "empty")


def about_cache() -> Iterator[Finding]:
    """Yield findings about the cache folder: its file system, its locks, and its size cap."""
    from catalog.build.cache import Cache, Entries
    from catalog.build.installed import installed_folders
    from catalog.build.locks import STRATEGIES
    from catalog.build.permissions import require_private
    from catalog.units import format_size

    cache = Cache(settings().cache_dir)
    state = "created when first needed"
    if cache.folder.is_dir():
        try:
            require_private(cache.folder)
            state = "private" if os.access(cache.folder, os.W_OK) else "not writable: serves what it has"
        except CatalogError as error:
            state = error.message
    yield Finding("cache", str(cache.folder), state)
    shared = "shared between machines" if cache.locks.file_system.network else "local to this machine"
    yield Finding("cache file system", cache.locks.file_system.type or "unknown", shared)
    yield Finding("cache locks", cache.locks.strategy, STRATEGIES[cache.locks.strategy])
    cap = settings().cache_max_bytes
    about = "beyond it the least recently used libraries are dropped; CATALOG_CACHE_MAX_BYTES"
    yield Finding("cache size cap", format_size(cap) if cap else "none", about)
    remote = settings().remote
    if remote is not None:
        use = "read and written" if settings().remote_write else "read"
        signed = "signed entries only" if settings().remote_signers else "any entry"
        yield Finding("remote cache", without_password(remote), f"{use}; {signed}; CATALOG_REMOTE")
    for folder in installed_folders():
        yield Finding("installed libraries", str(folder), counted(len(Entries(folder).keys()), "library"))


def _checkout() -> Finding:
    from catalog.ops.attention.upstream.sources import find_checkout

    try:
        checkout = find_checkout()
    except CatalogError as error:
        return Finding("CK checkout", "none", error.line)
    generator = checkout.generator
    about = f"detected as revision {generator.revision}; APIs {', '.join(generator.apis)}"
    return Finding("CK checkout", str(generator.path), about)


def about_plugins() -> Iterator[Finding]:
    """Yield findings about what other distributions add: usable, or why not."""
    from catalog import backends, ops
    from catalog.foreign import installed

    for backend in backends.plugins():
        about = "" if backend.object is None else ", ".join(backend.object.isas)
        yield Finding(backend.title, "unusable" if backend.broken else "usable", backend.broken or about)
    added: list[Plugin[Operation] | Plugin[Extension]] = [*ops.plugins()]
    for of in ops.operations():
        added += ops.extensions(of.name)
    for plugin in added:
        about = "" if plugin.object is None else plugin.object.about
        yield Finding(plugin.title, "unusable" if plugin.broken else "usable", plugin.broken or about)
    for found in installed.plugins():
        about = "" if found.object is None else found.object.title
        yield Finding(found.title, "unusable" if found.broken else "usable", found.broken or about)


_MULTIPLY = ("amx", "asimd", "avx", "bf16", "fma", "fphp", "i8mm", "sve")
"""How the names of features begin that make arithmetic faster."""


def about_cpu() -> Finding:
    """The CPU's name, and its features that make arithmetic faster."""
    from catalog.runtime.devices.host.device import cpu_features, cpu_name

    return Finding("CPU", cpu_name(), " ".join(sorted(name for name in cpu_features() if name.startswith(_MULTIPLY))))


def _gpus() -> Iterator[Finding]:
    from catalog.backends import GpuBackend, backends

    for runtime in (backend.runtime() for backend in backends() if isinstance(backend, GpuBackend)):
        what = f"{runtime.vendor.company} GPUs"
        try:
            names = [f"{gpu.info.name} ({gpu.info.arch})" for gpu in runtime.gpus]
            yield Finding(what, ", ".join(names), f"{runtime.vendor.runtime} runtime {runtime.version}")
        except CatalogError as error:
            yield Finding(what, "none", error.line)


def _trials() -> Trials:
    from catalog.build.cache import Cache
    from catalog.build.trials import Trials

    return Trials(Cache(settings().cache_dir))


def _arches() -> Iterator[Finding]:
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from catalog.backends import spec_folders
    from catalog.schema.spec_files import known_archs

    with ThreadPoolExecutor() as pool:  # a compiler that is not yet known to work builds a small program
        yield from pool.map(partial(_arch, _trials()), known_archs(*spec_folders()))


def _arch(trials: Trials, arch: str) -> Finding:
    try:
        return _toolchain(trials, arch)
    except BackendError as error:
        return Finding(arch, "unusable", error.line)


def _toolchain(trials: Trials, arch: str) -> Finding:
    from catalog.backends import backend_of

    backend = backend_of(arch)
    reason = backend.why_unavailable(arch)
    runs = "runs here" if reason is None else f"does not run here: {reason}"
    if arch not in backend.isas:
        return Finding(arch, "no toolchain", f"this version does not compile for it; {runs}")
    diagnosis = trials.diagnose(arch, backend.target(arch).toolchain)
    missing = diagnosis.missing or ""
    if diagnosis.compiler is None or missing:
        return Finding(arch, "no toolchain", f"{missing.rstrip('.')}; {runs}")
    return Finding(arch, str(diagnosis.compiler.path), f"{diagnosis.compiler.title}; {runs}")
