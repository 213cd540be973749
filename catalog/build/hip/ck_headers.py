"""Revisions of CK's headers, which are known by their files, and what each offers of an operation's traits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

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


def revision_in(folder: Path, known: Mapping[str, Headers], what: str) -> str:
    """The revision of the headers in an operation's ``folder``, which is one of ``known``.

    Args:
        folder: such as ``include/ck_tile/ops/gemm`` of a checkout.
        known: revisions by name.
        what: what the headers compute, for the message: "GEMM".

    Raises:
        BuildError: it is not a known revision.
    """
    for revision, headers in known.items():
        if headers.are_in(folder):
            return revision
    raise BuildError(
        f"{folder} has the headers of none of the revisions {', '.join(known)}: the catalog cannot write the "
        f"source of a {what} kernel for them",
        hint="CATALOG_CK_ROOT or --ck-root names another checkout.",
    )
