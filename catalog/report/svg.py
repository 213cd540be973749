"""Adapts Matplotlib's SVG to a page: colours of the page's theme, tooltips, and ids that are unique on the page.

Matplotlib has no CSS. Artists get colours from :data:`COLOURS` as placeholders for variables of the page, and ``gid``s
as placeholders for tooltips; both are replaced here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = 8
"""Colours that distinguish series."""

INK, MUTED, GRID, PAPER = "#fe0001", "#fe0002", "#fe0003", "#fe0004"
SERIES_COLOURS = tuple(f"#fd000{index}" for index in range(SERIES))

COLOURS = {
    **{INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"},
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES_COLOURS)},
}
"""The page's name for each colour."""

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


class Tips:
    """The tooltips of a figure; an artist with tooltips has the ``gid`` that :meth:`add` returns."""

    def __init__(self) -> None:
        self._texts: dict[str, Sequence[str]] = {}

    def add(self, texts: Sequence[str]) -> str:
        """Add one text per mark of an artist, in order; return the artist's ``gid``."""
        gid = f"tips{len(self._texts)}"
        self._texts[gid] = texts
        return gid

    def attach(self, root: ElementTree.Element) -> None:
        """Give each mark its title, which browsers show and screen readers read."""
        for element in list(root.iter()):
            texts = self._texts.get(element.get("id", ""))
            if texts is None:
                continue
            marks = _marks(element)
            if len(marks) != len(texts):
                raise AssertionError(f"{len(marks)} marks have {len(texts)} tooltips")
            for mark, text in zip(marks, texts, strict=True):
                title = ElementTree.Element(f"{{{_SVG}}}title")
                title.text = text
                mark.insert(0, title)


def _marks(element: ElementTree.Element) -> list[ElementTree.Element]:
    """What is drawn inside of an element: uses of markers, or paths of its own."""
    defined = {id(path) for defs in element.iter(f"{{{_SVG}}}defs") for path in defs.iter()}
    uses = list(element.iter(f"{{{_SVG}}}use"))
    return uses or [path for path in element.iter(f"{{{_SVG}}}path") if id(path) not in defined]


def to_svg(figure: Figure, name: str, label: str, tips: Tips) -> str:
    """``figure`` as an ``<svg>`` element of a page.

    Args:
        figure: drawn in the colours above.
        name: of letters and digits; no other figure of the page has it.
        label: what it shows, for those who do not see it.
        tips: of its artists.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    for prefix, uri in (("", _SVG), ("xlink", _XLINK)):
        ElementTree.register_namespace(prefix, uri)
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314 - it is Matplotlib's own
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    tips.attach(root)
    _rename(root, name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": label}
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    return text


def _rename(root: ElementTree.Element, name: str) -> None:
    """Keep the ids that something refers to, and make them the figure's own."""
    wanted = set[str]()
    for element in root.iter():
        for attribute, value in element.attrib.items():
            found = {value[1:]} if attribute == f"{{{_XLINK}}}href" else set(_REFERENCE.findall(value))
            wanted |= found
            if found:
                renamed = _REFERENCE.sub(rf"url(#{name}-\1)", value)
                element.set(attribute, f"#{name}-{value[1:]}" if renamed == value else renamed)
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in wanted:
            element.set("id", f"{name}-{old}")
