"""The outcomes of first runs of libraries on this machine, stored beside the cache's entries.

    guard/<key>.<arch of the device>    one small JSON file each

A library that ran to completion is stored with its digest: a different library under the same key gets a new first run.
A library that crashed, hung or gave a wrong result is quarantined under its key until it is released, at the latest
after the number of days in the settings. If the cache is read-only, the process keeps the outcome in memory.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Set
from datetime import datetime, timedelta, timezone
from pathlib import Path

from catalog.files import Sync, publish, read_own
from catalog.registry.rows import Digest, Name, PastStamp, Row, Text
from catalog.settings import settings

_log = logging.getLogger(__name__)

_MOST_BYTES = 2**16

_FILE = re.compile(r"[0-9a-f]{64}\..+")


class Quarantine(Row):
    """A library that must not be run since ``when`` (ISO 8601, in UTC), for a ``reason``.

    ``device`` is the arch of the device that it ran on, ``problem`` the key of the problem.
    """

    key: Digest
    kernel_id: Name
    kernel: Name
    arch: Name
    device: Name
    reason: Text
    problem: Text
    when: PastStamp

    @property
    def until(self) -> str:
        """The end of the quarantine in the form of ``when``, by the current settings."""
        return self._end.isoformat(timespec="seconds")

    @property
    def over(self) -> bool:
        """Whether the library may have another first run."""
        return self._end <= datetime.now(timezone.utc)

    @property
    def _end(self) -> datetime:
        begin = datetime.fromisoformat(self.when)
        return begin + timedelta(days=settings().quarantine_days)

    @property
    def log(self) -> str:
        """The fields as lines of text for the registry."""
        return "".join(f"{name}: {value}\n" for name, value in self.model_dump().items())

    @classmethod
    def of_log(cls, log: str) -> Quarantine | None:
        """The quarantine written by :attr:`log`; None if the text is something else."""
        lines = dict(line.split(": ", 1) for line in log.splitlines() if ": " in line)
        with contextlib.suppress(ValueError):
            return cls.model_validate({name: lines[name] for name in cls.model_fields if name in lines})
        return None


class _Verdict(Row):
    """The outcome of a library's first run: the digest of one that ran to completion, a quarantine, or neither."""

    passed: Digest | None = None
    quarantined: Quarantine | None = None

    @property
    def quarantine(self) -> Quarantine | None:
        """The quarantine, unless it has ended."""
        return None if self.quarantined is None or self.quarantined.over else self.quarantined


_unwritten: dict[Path, _Verdict] = {}
"""Outcomes that this process could not write, by their files."""


class FirstRuns:
    """The outcomes of first runs stored in one cache folder."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "guard"

    def passed(self, key: str, sha256: str, device: str) -> bool:
        """Whether the library of ``key`` with the digest ``sha256`` has run to completion on such a device."""
        return self._read(self._file(key, device)).passed == sha256

    def quarantine_of(self, key: str, device: str) -> Quarantine | None:
        """The current quarantine of the library of ``key`` on such a device, if any."""
        return self._read(self._file(key, device)).quarantine

    def remember(self, key: str, sha256: str, device: str) -> None:
        """Record that a library has run to completion."""
        self._write(self._file(key, device), _Verdict(passed=sha256))

    def quarantine(self, quarantine: Quarantine) -> None:
        """Record that a library must not be run."""
        self._write(self._file(quarantine.key, quarantine.device), _Verdict(quarantined=quarantine))

    def quarantined(self) -> list[Quarantine]:
        """All quarantines, the oldest first."""
        files = {file for file in self._files() if _FILE.fullmatch(file.name)} | {
            file for file in _unwritten if file.parent == self._folder
        }
        found = (self._read(file).quarantine for file in files)
        return sorted((one for one in found if one is not None), key=lambda one: (one.when, one.kernel, one.key))

    def forget(self, key: str) -> None:
        """Forget the outcomes of the library of ``key`` on all devices.

        Raises:
            OSError: an outcome cannot be deleted.
        """
        for file in self._files():
            if file.name.startswith(f"{key}."):
                file.unlink(missing_ok=True)
        for file in [file for file in _unwritten if file.parent == self._folder and file.name.startswith(f"{key}.")]:
            del _unwritten[file]

    def sweep(self, keys: Set[str], young: float, *, dry_run: bool = False) -> int:
        """Forget completed runs of libraries that are not among ``keys``; return the number of files (to be) deleted.

        Quarantines stay. Files left by killed writers are deleted once they are ``young`` seconds old.

        Raises:
            OSError: one cannot be deleted.
        """
        count = 0
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):
                if _FILE.fullmatch(file.name):
                    gone = file.name[:64] not in keys and self._read(file).quarantine is None
                else:
                    gone = time.time() - file.stat().st_mtime >= young
                if gone:
                    count += 1
                    if not dry_run:
                        file.unlink()
        return count

    def _file(self, key: str, device: str) -> Path:
        return self._folder / f"{key}.{device}"

    def _files(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return list(self._folder.iterdir())
        return []

    def _read(self, file: Path) -> _Verdict:
        if file in _unwritten:
            return _unwritten[file]
        try:
            return _Verdict.model_validate_json(read_own(file, _MOST_BYTES))
        except (OSError, ValueError):
            return _Verdict()

    def _write(self, file: Path, verdict: _Verdict) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish(file, verdict.model_dump_json(exclude_none=True), Sync.NONE)
        except OSError as error:
            _log.debug("%s: remembered by this process only: %s", file, error)
            _unwritten[file] = verdict
        else:
            _unwritten.pop(file, None)
