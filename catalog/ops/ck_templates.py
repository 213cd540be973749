"""Operations whose kernels for AMD are instances of CK's templates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.ops.protocol import Operation
from catalog.schema.kernel import Kernel

if TYPE_CHECKING:
    from catalog.build.hip.ck_headers import CkHeaders


@dataclass(frozen=True)
class CkTemplates:
    """CK's templates of one operation.

    Attributes:
        headers: where they are, and what each revision offers.
        emit: writes the source of a kernel, an instance, for headers of a revision.
    """

    headers: CkHeaders[Any]
    emit: Callable[[Kernel, str], str]


class TemplatedOperation(Operation):
    """An operation with kernels for AMD that are instances of :attr:`templates`."""

    @property
    @abstractmethod
    def templates(self) -> CkTemplates:
        """CK's templates of the operation."""

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """For AMD, an instance of the templates of the CK checkout."""
        if backend != "hip":
            return super().emit(kernel, backend, memory)
        templates = self.templates
        return templates.emit(kernel, templates.headers.revision_of(templates.headers.find_include()))

    def other_headers(self, backend: str) -> Mapping[str, Path]:
        """The headers of the CK checkout, for AMD."""
        return {"ck": self.templates.headers.find_include()} if backend == "hip" else {}

    def headers_revisions(self, kernel: Kernel) -> tuple[str, ...]:
        """As :meth:`catalog.build.hip.ck_headers.CkHeaders.revisions_here`."""
        return self.templates.headers.revisions_here()

    def fallback(self) -> tuple[str, str]:
        """As stated by the facts of the templates."""
        chosen = self.templates.headers.facts().fallback
        return chosen.revision, chosen.where
