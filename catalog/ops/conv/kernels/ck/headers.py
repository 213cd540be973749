"""What the convolution headers of CK's revisions offer: ``data/toolchains/ck_conv.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from catalog.build.hip.ck_headers import Facts, Fallback, Headers, revision_in
from catalog.build.hip.ck_include import ck_include
from catalog.build.toolchains import read_facts

_CONV = "ck_tile/ops/grouped_convolution"


class ConvFacts(Facts):
    """The content of ``data/toolchains/ck_conv.json``.

    Attributes:
        fallback: a kernel that every AMD arch has.
        elements: C++ types of element types.
        pipelines: class templates, in the namespace ck_tile, that compute the loop over K and that divide it into a hot
            loop and a tail; the second one is empty for a simple loop.
        specializations: members of ck_tile::ConvolutionSpecialization.
        layouts: of input, weight and output, by number of axes.
        headers: the known revisions of headers by name.
    """

    fallback: Fallback
    elements: Mapping[str, str]
    pipelines: Mapping[str, tuple[str, str]]
    specializations: Mapping[str, str]
    layouts: Mapping[str, tuple[str, str, str]]
    headers: Mapping[str, Headers]


def conv_facts() -> ConvFacts:
    """Facts about CK's convolution headers.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(ConvFacts, "toolchains/ck_conv.json")


def find_include() -> Path:
    """As :func:`~catalog.build.hip.ck_include.ck_include`, for convolution.

    Raises:
        BuildError: there is no checkout, or no convolution in it.
    """
    return ck_include(_CONV)


def revision_of(include: Path) -> str:
    """The revision of the headers in the folder ``include`` of a checkout.

    Raises:
        BuildError: it is not a known revision.
    """
    return revision_in(include / _CONV, conv_facts().headers, "convolution")
