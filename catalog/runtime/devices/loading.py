"""Loading of kernel libraries for any target: opened once, checked against their row, and launched."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import resource
import shlex
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from catalog.build.cache import MOST_LIBRARY_BYTES
from catalog.build.permissions import require_safe
from catalog.errors import CacheError, ChangedLibraryError, DeviceError, UsageError
from catalog.files import UnsafeFileError, open_own
from catalog.ops import DEFAULT, operation
from catalog.schema.arguments import Arguments

REBUILD = "Build the kernel again."

_OK, _ABI_MISMATCH = 0, 1

_STATUS: Mapping[int, str] = MappingProxyType(
    {
        _ABI_MISMATCH: "it was built with another version of the argument struct",
        2: "the kernel was not built for this call",
        3: "it could not allocate its scratch memory",
        4: "the device's runtime refused the launch",
        5: "this CPU lacks instructions that it uses, or the system does not permit them; see CPU in `catalog doctor`",
    }
)
"""The meaning of each catalog_status except OK."""


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A loaded library: the row that it was built from, that row's arch where the library says it, its entry points.

    ``arguments`` are those of the row's operation. ``pool`` is the address of the library's own ``catalog_pool``, None
    if it brings no threads along. ``openmp_pool`` gives that of a pool with the threads of an OpenMP runtime; it takes
    the addresses of the runtime's ``GOMP_parallel``, ``omp_get_max_threads`` and ``omp_get_thread_num``.
    """

    id: str
    path: Path
    arch: str | None
    arguments: Arguments = field(repr=False)
    entry: Callable[[Any, int | None], int] = field(repr=False)
    size: Callable[[Any, Any], int] = field(repr=False)
    pool: int | None = field(default=None, repr=False)
    openmp_pool: Callable[[int, int, int], int] | None = field(default=None, repr=False)

    @property
    def address(self) -> int:
        """The address of the entry point."""
        entry: Any = self.entry
        return ctypes.cast(entry, ctypes.c_void_p).value or 0

    def workspace(self, args: Any) -> Any:
        """The workspaces between stages that a launch with the sizes in ``args`` needs; no tensor is read.

        Raises:
            DeviceError: a size is negative, or a workspace is larger than any memory.
        """
        size = self.arguments.workspace()
        status = self.size(ctypes.byref(args), ctypes.byref(size))
        if status != _OK:
            raise self._refusal(status)
        return size

    def launch(self, pointer: Any, stream: int | None = None) -> None:
        """Call the entry point with a pointer to the argument struct and a stream's handle (None: default stream).

        Raises:
            DeviceError: the kernel rejects the call or runs out of memory.
        """
        status = self.entry(pointer, stream)
        if status != _OK:
            raise self._refusal(status)

    def _refusal(self, status: int) -> DeviceError:
        return DeviceError(f"kernel {self.id}: {_STATUS.get(status, f'unknown status {status}')}")


class Libraries:
    """The kernels that a device has loaded, each only once."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Path, str], LoadedKernel] = {}

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """Load the kernel in the library at ``path``, whose content has the digest ``sha256``.

        Raises:
            ChangedLibraryError, CacheError: as :func:`open_library`.
            DeviceError: the library does not load, lacks an entry point, has another ABI version, or was not built from
                row ``kernel_id``.
        """
        kernel = self._kernels.get((path, sha256))
        if kernel is None:
            kernel = self._kernels[path, sha256] = _kernel(path, open_library(path, sha256))
        if kernel.id != kernel_id:
            raise DeviceError(f"{path} was built from row {kernel.id}, not from {kernel_id}", hint=REBUILD)
        return kernel


_held: list[int] = []
"""Descriptors of all libraries that this process has loaded; libraries are never unloaded."""


def open_library(path: Path, sha256: str) -> ctypes.CDLL:
    """Load the library at ``path``, whose content has the digest ``sha256``.

    A shared lock on the file marks the library as in use until the process ends.

    The content is checked before any of it runs, and loaded through the descriptor that it was read from, so a file
    renamed over the path in between is not loaded. Only the file's owner could still change the file itself; see
    :mod:`catalog.build.permissions`.

    Raises:
        ChangedLibraryError: the file is gone, has another content or owner, is a link, or is not a regular file.
        CacheError: anybody may write to the library or to a folder above it.
        DeviceError: the loader rejects it.
    """
    path = path.absolute()
    try:
        require_safe(path.parent)
        with open_own(path, MOST_LIBRARY_BYTES) as file:
            descriptor = os.dup(file.fileno())
    except FileNotFoundError:
        raise ChangedLibraryError(f"{path} is gone", hint=REBUILD) from None
    except UnsafeFileError as error:
        raise ChangedLibraryError(f"{path} is not loaded: {error.strerror}", hint=REBUILD) from None
    except OSError as error:
        raise DeviceError(f"cannot load {path}: {error.strerror}", hint=REBUILD) from None
    try:
        with contextlib.suppress(OSError):  # no locks here, or it is being dropped: the open file stays readable
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _check(path, descriptor, sha256)
        library = _load(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    _held.append(descriptor)
    _leave_room(descriptor)
    return library


def _check(path: Path, descriptor: int, sha256: str) -> None:
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read(os.fstat(descriptor).st_size + 1)
    if os.fstat(descriptor).st_mode & stat.S_IWOTH:
        raise CacheError(f"{path} is not loaded: anybody may write to it", hint=f"chmod o-w {shlex.quote(str(path))}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ChangedLibraryError(f"{path} is not loaded: it has changed since it was built", hint=REBUILD)


def _load(path: Path, descriptor: int) -> ctypes.CDLL:
    """Load an open file under a unique name, since the loader identifies libraries by name.

    By path, the loader would return the old file after a rebuild; by descriptor number, another library after the
    number is reused. The dots in the name make it unlike any name that others use.
    """
    name = Path(f"/proc/self/fd/{descriptor}")
    try:
        if name.exists():
            return ctypes.CDLL(f"/proc/self/./fd/{descriptor}", mode=ctypes.RTLD_LOCAL)
        with tempfile.TemporaryDirectory() as folder:
            alias = Path(folder) / path.name
            alias.symlink_to(path)
            return ctypes.CDLL(str(alias), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise DeviceError(f"cannot load {path}: {error}", hint=REBUILD) from None


def _leave_room(descriptor: int) -> None:
    """Raise the process's limit on descriptors before it is reached, as far as allowed: each library holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and 2 * descriptor > soft:
        more = 4 * soft if hard == resource.RLIM_INFINITY else min(4 * soft, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _kernel(path: Path, library: ctypes.CDLL) -> LoadedKernel:
    try:
        describe, entry, size = library.catalog_describe, library.catalog_launch, library.catalog_workspace_size
    except AttributeError as error:
        raise DeviceError(f"{path} is not a kernel: {error}", hint=REBUILD) from None
    describe.restype = ctypes.c_char_p
    for function in (entry, size):
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    try:
        row = json.loads(describe())
        kernel_id, arguments = str(row["id"]), operation(row.get("operation", DEFAULT)).arguments
    except (TypeError, ValueError, KeyError, UsageError):
        raise DeviceError(f"{path} does not say which row it was built from: {describe()!r}", hint=REBUILD) from None
    # No kernel runs negative sizes, but every kernel compares the ABI first.
    probe = arguments.new(**{size.name: -1 for size in arguments.sizes})
    if entry(ctypes.byref(probe), None) == _ABI_MISMATCH:
        raise DeviceError(f"{path}: {_STATUS[_ABI_MISMATCH]}", hint=REBUILD)
    return LoadedKernel(kernel_id, path, row.get("arch"), arguments, entry, size, *_pools(library))


def _pools(library: ctypes.CDLL) -> tuple[int | None, Callable[[int, int, int], int] | None]:
    """The address of the library's own pool, and the function that returns an OpenMP runtime's, if it has threads."""
    if not hasattr(library, "catalog_own_pool"):
        return None, None
    own, openmp = library.catalog_own_pool, library.catalog_openmp_pool
    own.restype, openmp.argtypes, openmp.restype = ctypes.c_void_p, 3 * (ctypes.c_void_p,), ctypes.c_void_p
    return own(), openmp
