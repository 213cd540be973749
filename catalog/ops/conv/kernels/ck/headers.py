"""What the convolution headers of CK's revisions offer: ``data/toolchains/ck_conv.json``."""

from __future__ import annotations

from collections.abc import Mapping

from catalog.build.hip.ck_headers import CkFacts, CkHeaders


class ConvFacts(CkFacts):
    """The content of ``data/toolchains/ck_conv.json``.

    Attributes:
        pipelines: class templates, in the namespace ck_tile, that compute the loop over K and that divide it into a hot
            loop and a tail; the second one is empty for a simple loop.
        specializations: members of ck_tile::ConvolutionSpecialization.
        layouts: of input, weight and output, by number of axes.
    """

    pipelines: Mapping[str, tuple[str, str]]
    specializations: Mapping[str, str]
    layouts: Mapping[str, tuple[str, str, str]]


HEADERS = CkHeaders("convolution", "ck_tile/ops/grouped_convolution", "toolchains/ck_conv.json", ConvFacts)
