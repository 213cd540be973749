"""One exception tree: every error says what is wrong, where, and what to do next.

``message`` holds the first two, ``hint`` the last; :mod:`catalog.messages` describes the style of both.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the signal's number."""


class CatalogError(RuntimeError):
    """Base of every error that the catalog raises on purpose.

    It is a RuntimeError, as PyTorch's errors are, so code that handles errors of PyTorch's attention also handles
    those of :mod:`catalog.torch`.

    ``exit_code`` is what the command line exits with: 1 for a failed job, 2 for bad usage.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"

    @property
    def line(self) -> str:
        """The error in one line, for a cell of a table."""
        return " ".join((self.message if self.hint is None else f"{self.message}. {self.hint}").split())

    @property
    def printed(self) -> str:
        """The error as the command line prints it."""
        return f"Error: {self.message}" + ("" if self.hint is None else f"\nHint: {self.hint}")


class UsageError(CatalogError):
    """The request itself is wrong: an unknown arch, receipt, option value."""

    exit_code = 2


class SpecError(CatalogError):
    """An arch spec is malformed; the message names the file and the path inside it."""


class BackendError(CatalogError):
    """Two backends claim the same arch; the message names their distributions."""


class MissingReferenceError(UsageError):
    """No reference list exists for the requested parity check."""


class GeneratorError(CatalogError):
    """The generator of a CK checkout produced no list: it failed, took too long, or printed something else."""

    exit_code = 2  # nothing was compared: 1 says that names differ


class RegistryError(CatalogError):
    """The SQLite file cannot be opened, is not a catalog, is newer than this code, or is locked."""


class QueryError(UsageError):
    """A query expression is invalid or not allowed; the message has SQLite's reason, the place, and similar columns."""


class ProblemError(UsageError):
    """A problem is invalid; the message names the field and the allowed values."""


class TensorError(UsageError):
    """A tensor is missing, unexpected, or has the wrong shape or dtype."""


class ArgumentError(UsageError, ValueError):
    """Two arguments contradict each other; also a ValueError, as in PyTorch."""


class TableError(UsageError):
    """A table of another project is malformed; the message names its lines. Nothing is imported."""


class SelectionError(CatalogError):
    """No kernel in the catalog answers the problem."""


class UnsupportedArgumentError(SelectionError, NotImplementedError):
    """An argument of another library's interface has a value that no kernel follows; also a NotImplementedError."""


class ChoicesError(CatalogError):
    """A file of frozen choices is damaged, has no choice for a problem, or names a kernel that the cache lacks."""


class ToolchainError(CatalogError):
    """No compiler for the target is usable; the message names what is missing and the package that provides it."""


class BuildError(CatalogError):
    """A kernel did not compile; ``log`` is the compiler's output."""

    def __init__(self, message: str, *, hint: str | None = None, log: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log


class CacheError(BuildError):
    """The cache folder cannot be used for any kernel: other users have access to it, or it is not writable."""


class MissingKernelError(BuildError):
    """A kernel's library is not in the cache, and compiling is disabled; the hint says how to build it elsewhere."""


class RemoteError(CatalogError):
    """The remote cache does not answer, refuses, or takes too long; the message has its URL and the reason."""


class BundleError(CatalogError):
    """A bundle cannot be written, is damaged, or is for another version or machine; nothing from it is kept."""


class MissingPackageError(UsageError, ImportError):
    """A package that an extra installs is missing or too old; also an ImportError."""


class DeviceError(CatalogError):
    """The device that a kernel needs is absent, or a launch failed."""


class KernelFaultError(DeviceError):
    """A kernel failed on a GPU, and the process can no longer use that GPU; ``fault`` completes "the kernel ..."."""

    def __init__(self, message: str, *, hint: str, fault: str) -> None:
        super().__init__(message, hint=hint)
        self.fault = fault


class ChangedLibraryError(DeviceError):
    """A library was removed or changed between its build and its load; building the kernel again fixes it."""


class QuarantinedError(DeviceError):
    """The kernel of row ``kernel_id`` failed or gave a wrong result in its first run; it is not run for some time."""

    def __init__(self, message: str, *, hint: str, kernel_id: str) -> None:
        super().__init__(message, hint=hint)
        self.kernel_id = kernel_id


class ClusterError(CatalogError):
    """The build machines are unreachable, unusable, or gone."""
