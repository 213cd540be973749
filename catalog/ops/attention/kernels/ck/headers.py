"""What the headers of CK's revisions offer, and how they spell it: ``data/toolchains/ck_headers.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, RootModel

from catalog.build.toolchains import read_facts
from catalog.errors import BuildError
from catalog.schema.traits import TraitValue

_FMHA = "ck_tile/ops/fmha"


class Headers(BaseModel):
    """One revision of CK's headers.

    Attributes:
        source: where the facts were read.
        has, lacks: files below ``include/ck_tile/ops/fmha`` that tell the revision from others.
        elements: C++ types of the element types that have a configuration, forward (fwd) and backward (bwd).
        masks: C++ types of masks, for each implementation of masks.
        masks_of: those of families that compile with one implementation only, which computes every mask.
        pipelines: class templates of the pipelines of each family that has a choice, in the namespace ck_tile.
        only: values of the traits of which the headers do not implement all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    elements: Mapping[str, Mapping[str, str]]
    masks: Mapping[str, Mapping[str, str]]
    masks_of: Mapping[str, Mapping[str, str]] = {}
    pipelines: Mapping[str, Mapping[str, str]]
    only: Mapping[str, tuple[TraitValue, ...]]

    def are_in(self, include: Path) -> bool:
        """Whether the folder ``include`` of a checkout holds headers of this revision."""
        folder = include / _FMHA
        return all((folder / name).is_file() for name in self.has) and not any(
            (folder / name).exists() for name in self.lacks
        )


class _Facts(RootModel[Mapping[str, Headers]]):
    model_config = ConfigDict(frozen=True)


def all_headers() -> Mapping[str, Headers]:
    """The known revisions of headers by name.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(_Facts, "toolchains/ck_headers.json").root


def revision_of(include: Path) -> str:
    """The revision of the headers in the folder ``include`` of a checkout.

    Raises:
        BuildError: they are of none that is known.
    """
    known = all_headers()
    for revision, headers in known.items():
        if headers.are_in(include):
            return revision
    raise BuildError(
        f"{include / _FMHA} has the headers of none of the revisions {', '.join(known)}: the catalog cannot write the "
        "source of a row of a sweep for them",
        hint="CATALOG_CK_ROOT or --ck-root names another checkout; catalog query \"space='ck'\" shows the rows whose "
        "source the checkout's generator writes.",
    )
