"""The remote cache: a place that machines share, by URL, so that each kernel is compiled once for all of them.

    KEY.kernel   an entry: a line of JSON, the record and its signature if it has one; then the library
    newest/HASH  the key of the newest entry for a row and an ABI, for machines without a compiler

An entry is one object, because stores replace single objects at once, but not two. It is read into the cache's own
work folder, checked as an entry of the cache is, and published there under the cache's lock: what is loaded is always
a file of the cache.

What is absent is compiled. A remote cache that fails is left alone for a while, after one line in the log, and
everything is compiled as if there were none. Every transfer has a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from catalog.build.cache import (
    MOST_LIBRARY_BYTES,
    MOST_RECORD_BYTES,
    ArtifactRecord,
    Cache,
    DamagedEntry,
    RecordFile,
    subject_of,
)
from catalog.build.keys import hash_parts
from catalog.build.signatures import Signer, is_signed, read_signers
from catalog.build.toolchains import LIBRARY
from catalog.errors import CacheError, RemoteError, UsageError
from catalog.extras import how_to_install
from catalog.files import open_own, publish
from catalog.messages import without_password
from catalog.settings import Settings

RETRY_SECONDS = 60.0
"""How long a remote cache that failed is left alone."""

_KEY = re.compile(rb"[0-9a-f]{64}")

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Signature(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    value: str


class _Head(BaseModel):
    """The first line of an entry."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    entry: RecordFile
    signature: _Signature | None


@dataclass(frozen=True)
class Found:
    """An entry that was read and checked; ``path`` is that of the library, in the folder that the caller named."""

    path: Path
    file: RecordFile


class Remote:
    """The entries at a URL.

    Args:
        url: ``file://``, ``http(s)://``, ``s3://``, ``gs://`` or another URL that fsspec knows.
        write: whether entries are written.
        timeout: time limit of a transfer in seconds.
        signers: the only public keys whose entries are accepted, with comments; None: any entry.
        signer: signs what is written.

    Raises:
        UsageError: fsspec, or its package for such URLs, is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        write: bool = False,
        timeout: float = 10.0,
        signers: Mapping[str, str] | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.scheme = self.url.partition("://")[0]
        self.shown = without_password(self.url)
        self.write = write
        self._timeout = timeout
        self._signers = signers
        self._signer = signer
        self._failed_at = -math.inf
        self._reported = False
        try:
            from fsspec import get_filesystem_class

            get_filesystem_class(self.scheme)
        except ImportError as error:
            needs = {"s3": "s3", "gs": "gcs"}.get(self.scheme, "remote")
            raise UsageError(f"CATALOG_REMOTE={self.shown}: {error}", hint=how_to_install(needs)) from None
        except ValueError as error:
            raise UsageError(f"CATALOG_REMOTE={self.shown}: {error}") from None

    @classmethod
    def of(cls, chosen: Settings) -> Remote | None:
        """The remote cache of the settings, if they name one.

        Raises:
            UsageError: as the class; or a file of keys cannot be used.
        """
        if chosen.remote is None:
            return None
        return cls(
            chosen.remote,
            write=chosen.remote_write,
            timeout=chosen.remote_timeout,
            signers=None if chosen.remote_signers is None else read_signers(chosen.remote_signers),
            signer=None if chosen.remote_key is None else Signer(chosen.remote_key),
        )

    def pull(self, key: str, cache: Cache) -> ArtifactRecord | None:
        """Make the remote entry of ``key`` one of ``cache``; the caller holds the cache's lock of ``key``.

        None if there is no sound one, or the remote cache cannot be reached.

        Raises:
            OSError: the cache folder cannot be written.
        """
        with cache.workspace(key) as folder:
            found = self._or_go_on(lambda: self.get(key, folder))
            if found is None:
                return None
            cache.publish(found.path, found.file.record, found.file.origin)
            _log.info("fetched %s from %s", found.file.origin.kernel_name, self.shown)
            return found.file.record

    def fetch(self, key: str, cache: Cache, stop: threading.Event) -> ArtifactRecord | None:
        """The record of ``key`` in ``cache``, after a :meth:`pull` if there is none; None if there still is none.

        None also in a folder that cannot be written, which serves what it has.

        Raises:
            Interrupted: ``stop`` was set.
            CacheError: others have access to the cache folder.
        """
        try:
            with cache.lock(key, stop):
                return cache.load(key) or self.pull(key, cache)
        except OSError as error:
            _log.warning("the cache %s cannot keep kernels of %s: %s", cache.folder, self.shown, error.strerror)
            return None

    def newest(self, subject: str, arch: str, abi: int) -> str | None:
        """The key of the newest entry for a subject; None if there is none, or the remote cache cannot be reached."""
        return self._or_go_on(lambda: self._within(lambda: self._read_newest(subject, arch, abi)))

    def share(self, key: str, cache: Cache) -> None:
        """Write an entry of ``cache``, if this is allowed and the remote cache can be reached."""
        if self.write:
            self._or_go_on(lambda: self.put(key, cache))

    def has(self, key: str) -> bool:
        """Whether there is an entry, sound or not.

        Raises:
            RemoteError: the remote cache cannot be reached.
        """

        def look() -> bool:
            store, path = self._at(f"{key}.kernel")
            return bool(store.exists(path))

        return self._within(look)

    def get(self, key: str, folder: Path) -> Found | None:
        """Read an entry into ``folder`` and check it; None if there is none, or an unsound one, which is reported.

        Raises:
            RemoteError: the remote cache cannot be reached.
        """
        copy = folder / "entry"
        try:
            if not self._within(lambda: self._download(f"{key}.kernel", copy)):
                return None
            return self._checked(key, copy, folder / LIBRARY)
        except DamagedEntry as damage:
            _log.warning("%s/%s.kernel is ignored: %s", self.shown, key, damage)
            return None

    def put(self, key: str, cache: Cache) -> None:
        """Write an entry of ``cache``, replacing any, and name it the newest one of its subject.

        Raises:
            RemoteError: it cannot be written.
        """
        try:
            record, origin = cache.read(key)
            with open_own(cache.so_path(key), record.so_bytes or 0) as file:
                library = file.read()
        except (DamagedEntry, OSError) as error:
            raise RemoteError(f"{cache.so_path(key)} cannot be shared: {error}") from None
        if hashlib.sha256(library).hexdigest() != record.so_sha256:
            raise RemoteError(f"{cache.so_path(key)} cannot be shared: it differs from its record")
        file_ = RecordFile.of(record, origin)
        by = self._signer
        signature = None if by is None else _Signature(key=by.public, value=by.sign(file_.sha256))
        head = _Head.model_construct(format=1, entry=file_, signature=signature).model_dump_json()
        self._within(lambda: self._upload(f"{key}.kernel", head.encode() + b"\n" + library))
        self._within(lambda: self._upload(_newest(subject_of(record, origin), record.arch, origin.abi), key.encode()))
        _log.info("wrote %s to %s", origin.kernel_name, self.shown)

    def _checked(self, key: str, copy: Path, library: Path) -> Found:
        """The entry in the file ``copy``; its library is written to ``library``.

        Raises:
            DamagedEntry: it is not what was written, or is not signed as it must be.
        """
        with copy.open("rb") as file:
            try:
                head = _Head.model_validate_json(file.readline(MOST_RECORD_BYTES))
            except ValueError:
                raise DamagedEntry("its record is damaged") from None
            content = file.read(MOST_LIBRARY_BYTES + 1)
        head.entry.check(key)
        record = head.entry.record
        if record.status != "built" or record.so_bytes != len(content):
            raise DamagedEntry("its library is incomplete")
        if record.so_sha256 != hashlib.sha256(content).hexdigest():
            raise DamagedEntry("its library differs from the one that was built")
        if self._signers is not None:
            self._require_signature(head)
        library.write_bytes(content)
        return Found(library, head.entry)

    def _require_signature(self, head: _Head) -> None:
        if head.signature is None:
            raise DamagedEntry("it is not signed, and CATALOG_REMOTE_SIGNERS demands a signature")
        if self._signers is not None and head.signature.key not in self._signers:
            raise DamagedEntry("it is signed with a key that CATALOG_REMOTE_SIGNERS does not list")
        if not is_signed(head.entry.sha256, head.signature.key, head.signature.value):
            raise DamagedEntry("its signature is not of this record")

    def _at(self, name: str) -> tuple[Any, str]:
        """The file system, and the path of an object in it; fsspec keeps file systems, one per process and thread."""
        from fsspec.core import url_to_fs

        store, path = url_to_fs(f"{self.url}/{name}")
        return store, str(path)

    def _download(self, name: str, copy: Path) -> bool:
        """Read an object into a new file; False if there is none."""
        from fsspec.callbacks import Callback

        deadline = time.monotonic() + self._timeout

        def check(_size: int | None, value: int, **_others: object) -> None:
            if time.monotonic() > deadline:  # nobody waits any more
                raise TimeoutError
            if value > MOST_RECORD_BYTES + MOST_LIBRARY_BYTES:
                raise DamagedEntry("it is too large to be an entry")

        store, path = self._at(name)
        try:
            store.get_file(path, str(copy), callback=Callback(hooks={"size": check}))
        except FileNotFoundError:
            return False
        return True

    def _read_newest(self, subject: str, arch: str, abi: int) -> str | None:
        store, path = self._at(_newest(subject, arch, abi))
        try:
            content: bytes = store.cat_file(path)
        except FileNotFoundError:
            return None
        return content.decode() if _KEY.fullmatch(content) else None

    def _upload(self, name: str, content: bytes) -> None:
        store, path = self._at(name)
        if self.scheme == "file":  # fsspec writes files in place, where others would read half of them
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            publish(Path(path), content)
        else:
            store.pipe_file(path, content)

    def _within(self, transfer: Callable[[], _T]) -> _T:
        """The result of a transfer, which runs in a thread of its own: no library limits the time of a whole one.

        Raises:
            RemoteError: it failed or took too long.
        """
        future = futures.Future[_T]()

        def work() -> None:
            try:
                future.set_result(transfer())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="remote cache", daemon=True).start()
        try:
            return future.result(self._timeout)
        except DamagedEntry:
            raise
        except futures.TimeoutError:
            reason = f"no answer within {self._timeout:g} s"
        except Exception as error:  # fsspec's file systems raise exceptions of many libraries
            reason = f"{type(error).__name__}: {error}".rstrip(": ").replace(self.url, self.shown)
        raise RemoteError(f"the remote cache {self.shown} cannot be used ({' '.join(reason.split())})")

    def _or_go_on(self, step: Callable[[], _T]) -> _T | None:
        """The result of ``step``; None if it failed now, or did so recently."""
        if time.monotonic() - self._failed_at < RETRY_SECONDS:
            return None
        try:
            return step()
        except RemoteError as error:
            self._failed_at = time.monotonic()
            level = logging.DEBUG if self._reported else logging.WARNING
            self._reported = True
            _log.log(level, "%s; going on with the local cache alone", error.message)
            return None


def _newest(subject: str, arch: str, abi: int) -> str:
    return f"newest/{hash_parts({'subject': [subject], 'arch': [arch], 'abi': [str(abi)]})}"


@dataclass(frozen=True)
class Pushed:
    """How many entries were written, and how many the remote cache had."""

    written: int
    present: int


def push(cache: Cache, remote: Remote, *, replace: bool) -> Pushed:
    """Write the sound entries of ``cache``, oldest first, so that the newest ones are named as such.

    Args:
        cache: the local cache; installed libraries are left out.
        remote: where to write.
        replace: whether entries that are there are written, too.

    Raises:
        CacheError: the cache folder cannot be read, or others have access to it.
        RemoteError: an entry cannot be written.
    """
    sound = []
    try:
        for key in cache.keys():  # noqa: SIM118 - no mapping
            with contextlib.suppress(DamagedEntry, FileNotFoundError):
                record = cache.check(key)
                sound.append((record.created, key))
    except OSError as error:
        raise CacheError(f"the cache {cache.folder} cannot be read: {error.strerror}") from None
    missing = [key for _, key in sorted(sound) if replace or not remote.has(key)]
    for key in missing:
        remote.put(key, cache)
    return Pushed(len(missing), len(sound) - len(missing))
