"""Building a catalog's kernels, with a compiler or from the cache alone."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from catalog import settings
from catalog.backends import target_of
from catalog.errors import BuildError, ToolchainError
from catalog.ops import emitters_of
from catalog.schema.lineage import OWN_SPACES

if TYPE_CHECKING:
    from catalog.build.builder import Artifact, Builder
    from catalog.runtime.build_log import BuildLog
    from catalog.runtime.catalog_file import CatalogFile
    from catalog.schema.kernel import Kernel

_log = logging.getLogger(__name__)


def why_not(kernel: Kernel, reason: str) -> str:
    """A clause that says that the headers refuse ``kernel``; ``reason`` is that of a rule."""
    return (
        f"{kernel.revision} lists it, but {reason}" if kernel.space in OWN_SPACES else f"it does not compile: {reason}"
    )


class Builds:
    """Builds kernels and records the results.

    Args:
        file: the catalog file for the records.
        compile: False: start no compiler; None: from the settings.
    """

    def __init__(self, file: CatalogFile, compile: bool | None) -> None:
        self._file = file
        self._compile = compile
        self._warned_of_compiler = False

    @property
    def may_compile(self) -> bool:
        """Whether kernels that are not in the cache are compiled; with frozen choices none are."""
        chosen = settings.settings()
        return chosen.compile and chosen.choices is None if self._compile is None else self._compile

    @cached_property
    def builder(self) -> Builder:
        """The builder: it compiles kernels, or only looks in the cache if compiling is disabled."""
        from catalog.build.builder import Builder

        return (
            Builder(settings.settings().cache_dir, self.log.record, targets=target_of, refuse=self._refuse)
            if self.may_compile
            else self._offline
        )

    @cached_property
    def _offline(self) -> Builder:
        from catalog.build.offline_builder import OfflineBuilder

        return OfflineBuilder(settings.settings().cache_dir, self.log.record, targets=target_of)

    @cached_property
    def log(self) -> BuildLog:
        """The results of builds and first runs."""
        from catalog.runtime.build_log import BuildLog

        return BuildLog(self._file, self)

    def build(self, kernel: Kernel) -> Artifact:
        """The library of ``kernel``; see :meth:`catalog.Catalog.build`.

        Raises:
            BuildError, ToolchainError: as :meth:`catalog.Catalog.build`.
        """
        from catalog.build.builder import CompileError

        try:
            return self.builder.build(kernel)
        except CompileError as error:
            reason = self._file.refusal(kernel)
            if reason is not None:
                error.hint = f"{why_not(kernel, reason)}. {error.hint}"
            raise
        except ToolchainError as error:
            return self._cached_instead(kernel, error)

    def require_checkout(self, kernel: Kernel) -> None:
        """Check that a checkout is named, if the kernel was adopted.

        Raises:
            BuildError: there is none; the hint names the one that the kernel's revision was adopted from.
        """
        if not kernel.base:
            return
        try:
            target_of(kernel.arch).headers_of(emitters_of(kernel))
        except BuildError as error:
            root = self._file.adopted_from(kernel)
            if root is not None:
                error.hint = f"CATALOG_CK_ROOT or --ck-root names it; {kernel.revision} was adopted from {root}"
            raise

    def _refuse(self, kernel: Kernel) -> None:
        """Raise BuildError for a row that cannot be built here: without its checkout, or refused by the headers.

        The header rules decide on rows of sweeps only; the compiler judges listed rows.
        """
        if kernel.base:
            target_of(kernel.arch).toolchain(kernel.arch)  # without one, the cache may still have the library
            self.require_checkout(kernel)
        reason = None if kernel.space in OWN_SPACES else self._file.refusal(kernel)
        if reason is not None:
            raise BuildError(
                f"kernel {kernel.name}: {why_not(kernel, reason)}",
                hint=f"`catalog rules --arch {kernel.arch} --kind headers` lists what the headers demand.",
            )

    def _cached_instead(self, kernel: Kernel, lacking: ToolchainError) -> Artifact:
        """Return the library of ``kernel`` from the cache, without a compiler.

        Raises:
            ToolchainError: ``lacking``, if the cache has none.
        """
        try:
            artifact = self._offline.build(kernel)
        except BuildError:
            raise lacking from None
        if not self._warned_of_compiler:
            self._warned_of_compiler = True
            _log.warning("%s; using only the kernels in the cache", lacking.message)
        return artifact
