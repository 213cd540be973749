"""One exception tree: every error says what is wrong, where, and what to do next.

``message`` says the first two, ``hint`` the last; :mod:`catalog.messages` says how they are written.
"""

from __future__ import annotations

INTERRUPTED = 130
"""What a program that Ctrl-C ended exits with: 128 and the signal's number."""


class CatalogError(RuntimeError):
    """Base of every error that the catalog raises on purpose.

    It is a RuntimeError, like PyTorch's errors: code that handles those of PyTorch's attention also handles those of
    :mod:`catalog.torch`.

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
    """An arch spec in data/arch_specs is malformed: names the file and the path inside it."""


class BackendError(CatalogError):
    """Two backends own one arch: names the distributions that they come from."""


class MissingReferenceError(UsageError):
    """No parity reference exists for what was asked."""


class GeneratorError(CatalogError):
    """The generator of a CK checkout gave no list: it failed, took too long, or printed something else."""

    exit_code = 2  # nothing was compared: 1 says that names differ


class RegistryError(CatalogError):
    """The SQLite file cannot be opened, is not a catalog, is newer than this code, or is locked."""


class QueryError(UsageError):
    """A query expression is refused or wrong: says what SQLite said, where, and near column names."""


class ProblemError(UsageError):
    """A problem is malformed: names the field and what is allowed."""


class TensorError(UsageError):
    """A tensor is missing, superfluous, or of the wrong shape or dtype."""


class ArgumentError(UsageError, ValueError):
    """Two arguments contradict each other; also a ValueError, as in PyTorch."""


class SelectionError(CatalogError):
    """No kernel of the catalog answers the problem."""


class ToolchainError(CatalogError):
    """No usable compiler for the target: names what is missing and the package that has it."""


class BuildError(CatalogError):
    """A kernel did not compile; ``log`` is the compiler's output."""

    def __init__(self, message: str, *, hint: str | None = None, log: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log


class CacheError(BuildError):
    """The cache folder cannot be used, whatever the kernel: others have access to it, or it cannot be written."""


class MissingKernelError(BuildError):
    """The cache has no library of a kernel, and compiling is forbidden: says how to build it elsewhere."""


class BundleError(CatalogError):
    """A bundle cannot be written, is damaged, or is not for this version or this machine; nothing of it is kept."""


class DeviceError(CatalogError):
    """The device a kernel is for is absent, or a launch failed."""


class KernelFaultError(DeviceError):
    """A kernel has failed on a GPU, which the process can no longer use; ``fault`` completes "the kernel ..."."""

    def __init__(self, message: str, *, hint: str, fault: str) -> None:
        super().__init__(message, hint=hint)
        self.fault = fault


class ChangedLibraryError(DeviceError):
    """A library is gone from the cache, or changed, between its build and its load; building again mends it."""


class QuarantinedError(DeviceError):
    """The kernel of row ``kernel_id`` failed in its first run or gave a wrong result: it is not run for some time."""

    def __init__(self, message: str, *, hint: str, kernel_id: str) -> None:
        super().__init__(message, hint=hint)
        self.kernel_id = kernel_id


class ClusterError(CatalogError):
    """The machines that should build are not reached, not usable, or gone."""
