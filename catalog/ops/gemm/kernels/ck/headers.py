"""What the GEMM headers of CK's revisions offer: ``data/toolchains/ck_gemm.json``."""

from __future__ import annotations

from collections.abc import Mapping

from catalog.build.hip.ck_headers import CkFacts, CkHeaders


class GemmFacts(CkFacts):
    """The content of ``data/toolchains/ck_gemm.json``.

    Attributes:
        pipelines: class templates, in the namespace ck_tile, that divide the loop over K and that compute it.
        families: our header that launches the kernels of a family.
    """

    pipelines: Mapping[str, tuple[str, str]]
    families: Mapping[str, str]


HEADERS = CkHeaders("GEMM", "ck_tile/ops/gemm", "toolchains/ck_gemm.json", GemmFacts)
