"""What the GEMM headers of CK's revisions offer: ``data/toolchains/ck_gemm.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from catalog.build.hip.ck_headers import Facts, Fallback, Headers, revision_in
from catalog.build.hip.ck_include import ck_include
from catalog.build.toolchains import read_facts

_GEMM = "ck_tile/ops/gemm"


class GemmFacts(Facts):
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
    return revision_in(include / _GEMM, gemm_facts().headers, "GEMM")
