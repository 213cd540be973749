"""Serving kernels without a compiler: from the cache and the remote cache only, nothing is compiled.

A content key depends on the compiler that made a library, so without asking a compiler there is no key. A row is served
by its newest intact entry whose record names the row and this version's ABI number, whichever compiler made it.
Entries are found by their records, which are read once. The remote cache names the newest entry of a row.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from catalog.build.builder import Artifact, Builder, Built, source_digest
from catalog.build.cache import ArtifactRecord, Cache, DamagedEntry, helper_subject, subject_of
from catalog.build.keys import abi_number
from catalog.errors import BuildError, MissingKernelError

if TYPE_CHECKING:
    from catalog.schema.kernel import Kernel

_Entry = tuple[ArtifactRecord, int]


class _Index:
    """The entries of a cache by subject (a row's id, or a helper's name, arch and source): records and ABI numbers,
    not checked against the libraries.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._seen: set[str] = set()
        self._entries: dict[str, list[_Entry]] = {}

    def newest_first(self, subject: str) -> list[_Entry]:
        """The entries for ``subject`` that have been read; they may have been damaged since."""
        entries = self._entries.get(subject, [])
        return sorted(entries, key=lambda entry: (entry[0].created, entry[0].key), reverse=True)

    def read_new(self) -> None:
        """Read the records that are new since the last call."""
        for key in self._cache.all_keys() - self._seen:
            entry = self._cache.read_record(key)
            if entry is None:
                continue  # it may still be being written
            self._seen.add(key)
            record, origin = entry
            self._entries.setdefault(subject_of(record, origin), []).append((record, origin.abi))


class OfflineBuilder(Builder):
    """Serves entries of the cache and of the remote cache; never starts a compiler."""

    @cached_property
    def _index(self) -> _Index:
        index = _Index(self.cache)
        index.read_new()
        return index

    def key_of(self, kernel: Kernel) -> str:
        """The content key of the entry that :meth:`build` serves, among those already read.

        Raises:
            MissingKernelError: the cache has none.
            BuildError: there is no target for the kernel's arch, or the cache cannot be read or is open to others.
        """
        record = self._find_sound(kernel.id, kernel.arch)
        if record is None:
            raise self._missing(kernel)
        return record.key

    def build_helper(self, name: str, arch: str, source: str) -> Artifact:
        """As :meth:`Builder.build_helper`, without a compiler: the newest entry with exactly this source.

        Raises:
            MissingKernelError: the cache has none.
            BuildError: as in :meth:`key_of`.
        """
        subject = helper_subject(name, arch, source_digest(source))
        record = self._demand(subject, arch) or self._fetch_newest(subject, arch, threading.Event())
        if record is None:
            raise MissingKernelError(
                f"{name} for {arch} is not in the cache {self.cache.folder}, and compiling is forbidden",
                hint="Run once with CATALOG_COMPILE=true.",
            )
        return self._built(record, cached=True).artifact

    def make(self, kernel: Kernel, stop: threading.Event) -> Built:
        """As :meth:`Builder.make`, without a compiler.

        Raises:
            MissingKernelError: the cache has none.
            BuildError: as in :meth:`key_of`.
        """
        record = self._demand(kernel.id, kernel.arch) or self._fetch_newest(kernel.id, kernel.arch, stop)
        if record is None:
            raise self._missing(kernel)
        return self._built(record, cached=True)

    def fault(self, kernel: Kernel, recorded: Collection[str] = ()) -> str | None:
        """Why the cache cannot serve ``kernel`` without a compiler; None if it can.

        Args:
            kernel: the row.
            recorded: content keys under which a catalog has recorded libraries of the row: their records may be
                damaged, so that the cache does not know whose they are.

        Raises:
            BuildError: there is no target for the kernel's arch, or the cache cannot be read or is open to others.
        """
        if self._demand(kernel.id, kernel.arch) is not None:
            return None
        abi = abi_number(self._targets(kernel.arch).abi_header)
        entries = self._index.newest_first(kernel.id)
        of_another = {record.key: built_for for record, built_for in entries if built_for != abi}
        faults = [f"ABI {built_for}, this version has ABI {abi}" for built_for in of_another.values()]
        for key in dict.fromkeys((*(record.key for record, _ in entries), *recorded)):
            if key not in of_another:
                with self._readable(), contextlib.suppress(FileNotFoundError):
                    try:
                        self.cache.check(key)
                    except DamagedEntry as damage:
                        faults.append(f"unsound: {damage}")
        return "; ".join(faults) or "absent"

    def _missing(self, kernel: Kernel) -> MissingKernelError:
        return MissingKernelError(
            f"kernel {kernel.name} is not in the cache {self.cache.folder}, and compiling is forbidden",
            hint="Build it where compiling is allowed: "
            f"CATALOG_COMPILE=true catalog build \"id='{kernel.id}'\" --arch {kernel.arch}",
        )

    def _demand(self, subject: str, arch: str) -> ArtifactRecord | None:
        """The record of the entry to serve. If none is known, new records are read first."""
        found = self._find_sound(subject, arch)
        if found is None:
            with self._readable():
                self._index.read_new()
            found = self._find_sound(subject, arch)
        return found

    def _fetch_newest(self, subject: str, arch: str, stop: threading.Event) -> ArtifactRecord | None:
        """The record of the newest entry of the remote cache, which is now one of the cache."""
        abi = abi_number(self._targets(arch).abi_header)
        key = None if self.remote is None else self.remote.newest(subject, arch, abi)
        if self.remote is None or key is None:
            return None
        record = self.remote.fetch(key, self.cache, stop)
        if record is None:
            return None
        self.cap.grew(record.so_bytes or 0)
        return self._demand(subject, arch)  # which it is not of, if somebody wrote the wrong key

    def _find_sound(self, subject: str, arch: str) -> ArtifactRecord | None:
        abi = abi_number(self._targets(arch).abi_header)
        with self._readable():
            for record, built_for in self._index.newest_first(subject):
                if built_for == abi and record.arch == arch:
                    sound = self.cache.load(record.key)
                    if sound is not None:
                        return sound
        return None

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BuildError(f"the cache {self.cache.folder} cannot be read: {error.strerror}") from None
