"""Trials of the toolchains of this machine: whether each one builds a small program for its arch.

    trials/<key>     one small JSON file per success

A trial takes up to two seconds, so a success is stored in the cache, under the content key of the program. It counts
until the compiler, a flag or a header changes, or until :meth:`Trials.forget`. A failure is not stored, so that a
repair is seen at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from catalog.build.cache import Cache
from catalog.build.keys import KeyMaker, TranslationUnit, hash_parts
from catalog.build.permissions import ANOTHER
from catalog.build.toolchains import Compiler, Toolchain
from catalog.errors import BuildError, CacheError, ToolchainError
from catalog.files import Sync, publish, read_own
from catalog.registry.rows import PastStamp, Row, Text

_log = logging.getLogger(__name__)

_MOST_BYTES = 2**17


class _Success(Row):
    """A toolchain, by its label, that built its probe at ``when`` (ISO 8601, in UTC)."""

    toolchain: Text
    when: PastStamp


@dataclass(frozen=True)
class Diagnosis:
    """Whether this machine can build for an arch: ``missing`` says what it lacks, None if nothing."""

    arch: str
    compiler: Compiler | None
    missing: str | None


class Trials:
    """The trials whose success one cache stores."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def diagnose(self, arch: str, find: Callable[[str], Toolchain]) -> Diagnosis:
        """Whether the toolchain that ``find`` returns for ``arch`` works.

        Raises:
            SpecError: a file of facts is missing or malformed.
        """
        compiler = None
        try:
            toolchain = find(arch)
            compiler = toolchain.compiler
            self.verify(toolchain)
        except ToolchainError as error:
            return Diagnosis(arch, compiler, error.line)
        return Diagnosis(arch, compiler, None)

    def verify(self, toolchain: Toolchain) -> None:
        """Like :meth:`Toolchain.verify`, but a stored success saves the trial.

        Raises:
            ToolchainError: a part does not work, or the launcher is missing.
        """
        toolchain.require_launcher()
        stored = self._file(toolchain)
        if stored is not None and _succeeded(stored):
            return
        toolchain.verify()
        if stored is not None:
            _store(stored, toolchain)

    def forget(self) -> None:
        """Forget all successes, so that each toolchain is tried again.

        Raises:
            CacheError: they cannot be deleted, or others have access to the cache folder.
        """
        try:
            self._cache.create()
            for file in self._cache.trials.iterdir():
                file.unlink()
        except OSError as error:
            raise CacheError(f"{error.filename}: {error.strerror}", hint=ANOTHER) from None

    def _file(self, toolchain: Toolchain) -> Path | None:
        """Where the success of ``toolchain`` is stored; None if its probe has no content key, or without a cache."""
        try:
            self._cache.create()
            key = KeyMaker(self._cache.scans).key(TranslationUnit(toolchain.probe, {}, abi=0), toolchain)
        except (BuildError, CacheError, OSError) as error:
            _log.debug("%s: its trial is not stored: %s", toolchain.label, error)
            return None
        parts = {"key": [key.hex], "launcher": toolchain.launcher, "places": toolchain.places}
        return self._cache.trials / hash_parts(parts)


def _succeeded(file: Path) -> bool:
    try:
        _Success.model_validate_json(read_own(file, _MOST_BYTES))
    except (OSError, ValueError):
        return False
    return True


def _store(file: Path, toolchain: Toolchain) -> None:
    """Store a success if possible: it only saves time."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        publish(file, _Success(toolchain=toolchain.label, when=now).model_dump_json(), Sync.NONE)
