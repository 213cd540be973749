"""What the GEMM headers of CK's revisions offer: ``data/toolchains/ck_gemm.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from catalog.build.hip.ck_include import ck_include
from catalog.build.toolchains import read_facts
from catalog.errors import BuildError
from catalog.schema.traits import TraitValue

_GEMM = "ck_tile/ops/gemm"


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Headers(_Facts):
    """One revision of CK's headers.

    Attributes:
        source: where the facts were read.
        has, lacks: files below ``include/ck_tile/ops/gemm`` that distinguish the revision.
        only: values of the traits of which the headers do not implement all.
    """

    source: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    only: Mapping[str, tuple[TraitValue, ...]]

    def are_in(self, include: Path) -> bool:
        """Whether the folder ``include`` of a checkout holds headers of this revision."""
        folder = include / _GEMM
        return all((folder / name).exists() for name in self.has) and not any(
            (folder / name).exists() for name in self.lacks
        )


class Fallback(_Facts):
    """The revision and the traits, as an SQL expression, of a kernel that is known to compile."""

    revision: str
    where: str


class GemmFacts(_Facts):
    """The content of ``data/toolchains/ck_gemm.json``.

    Attributes:
        fallback: a kernel that every AMD arch has.
        elements: C++ types of element types.
        pipelines: class templates, in the namespace ck_tile, that divide the loop over K and that compute it.
        families: our header that launches the kernels of a family.
        headers: the known revisions of headers by name.
    """

    fallback: Fallback
    elements: Mapping[str, str]
    pipelines: Mapping[str, tuple[str, str]]
    families: Mapping[str, str]
    headers: Mapping[str, Headers]


def gemm_facts() -> GemmFacts:
    """Facts about CK's GEMM headers.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(GemmFacts, "toolchains/ck_gemm.json")


def find_include() -> Path:
    """As :func:`~catalog.build.hip.ck_include.ck_include`, for GEMM.

    Raises:
        BuildError: there is no checkout, or no GEMM in it.
    """
    return ck_include(_GEMM)


def revision_of(include: Path) -> str:
    """The revision of the headers in the folder ``include`` of a checkout.

    Raises:
        BuildError: it is not a known revision.
    """
    known = gemm_facts().headers
    for revision, headers in known.items():
        if headers.are_in(include):
            return revision
    raise BuildError(
        f"{include / _GEMM} has the headers of none of the revisions {', '.join(known)}: the catalog cannot write the "
        "source of a GEMM kernel for them",
        hint="CATALOG_CK_ROOT or --ck-root names another checkout.",
    )
