"""Revisions of CK's headers, which are known by their files, and what each offers of an operation's traits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from catalog.build.hip.ck_include import ck_include
from catalog.build.toolchains import read_facts
from catalog.errors import BuildError
from catalog.schema.kernel import Kernel
from catalog.schema.traits import TraitValue


class Facts(BaseModel):
    """Facts of a file in ``data/toolchains``."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Headers(Facts):
    """One revision of CK's headers.

    Attributes:
        source: where the facts were read.
        has, lacks: files below the operation's folder that distinguish the revision.
        only: values of the traits of which the headers do not implement all.
    """

    source: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    only: Mapping[str, tuple[TraitValue, ...]]

    def are_in(self, folder: Path) -> bool:
        """Whether the operation's ``folder`` of a checkout holds headers of this revision."""
        return all((folder / name).exists() for name in self.has) and not any(
            (folder / name).exists() for name in self.lacks
        )

    def check(self, kernel: Kernel, revision: str) -> None:
        """Compare the traits of ``kernel`` with :attr:`only`.

        Raises:
            BuildError: the headers, of ``revision``, do not implement it; the message names the trait.
        """
        row = kernel.to_row()
        for trait, values in self.only.items():
            if row[trait] not in values:
                raise BuildError(
                    f"kernel {kernel.name}: CK's headers of {revision} have no {trait} = {row[trait]}",
                    hint=f"`catalog rules --operation {kernel.operation} --kind headers` lists what the headers "
                    "demand.",
                )


class Fallback(Facts):
    """The revision and the traits, as an SQL expression, of a kernel that is known to compile."""

    revision: str
    where: str


class CkFacts(Facts):
    """What the headers of an operation offer, in a file of its own; an operation adds what its kernels need.

    Attributes:
        fallback: a kernel that every AMD arch has.
        elements: C++ types of element types.
        headers: the known revisions of headers by name.
    """

    fallback: Fallback
    elements: Mapping[str, str]
    headers: Mapping[str, Headers]


OfOperation = TypeVar("OfOperation", bound=CkFacts)


@dataclass(frozen=True)
class CkHeaders(Generic[OfOperation]):
    """CK's headers of one operation.

    Attributes:
        what: what they compute, for messages: "GEMM".
        folder: where they are below an include folder, such as ``ck_tile/ops/gemm``.
        file: the file of their facts, below ``data``.
        model: the model of that file.
    """

    what: str
    folder: str
    file: str
    model: type[OfOperation]

    def facts(self) -> OfOperation:
        """What the headers offer.

        Raises:
            SpecError: the file is missing or malformed; the message names it and the field.
        """
        return read_facts(self.model, self.file)

    def find_include(self) -> Path:
        """As :func:`~catalog.build.hip.ck_include.ck_include`.

        Raises:
            BuildError: there is no checkout, or the operation is not in it.
        """
        return ck_include(self.folder)

    def revision_of(self, include: Path) -> str:
        """The revision of the headers in the folder ``include`` of a checkout.

        Raises:
            BuildError: it is not a known revision.
        """
        folder, known = include / self.folder, self.facts().headers
        for revision, headers in known.items():
            if headers.are_in(folder):
                return revision
        raise BuildError(
            f"{folder} has the headers of none of the revisions {', '.join(known)}: the catalog cannot write the "
            f"source of a {self.what} kernel for them",
            hint="CATALOG_CK_ROOT or --ck-root names another checkout.",
        )

    def revisions_here(self) -> tuple[str, ...]:
        """The revision of the checkout's headers, none if it is unknown; every known one if there is no checkout."""
        try:
            include = self.find_include()
        except BuildError:
            return tuple(self.facts().headers)
        try:
            return (self.revision_of(include),)
        except BuildError:
            return ()  # emitting says that they are unknown
