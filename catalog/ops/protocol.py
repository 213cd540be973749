"""What an operation says of itself: everything that the rest of the catalog asks about what kernels compute."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from catalog.errors import UsageError
from catalog.schema.kernel import Kernel
from catalog.schema.traits import Traits


class Operation(ABC):
    """What kernels compute: GEMM, attention, a convolution.

    Attributes:
        name: its word on the command line and in the catalog, a SQL identifier; also the name of its table of traits.
        about: what it computes, in a few words.
        kernel: the model of its rows, with its traits and names.
        specs: a folder like ``data/arch_specs``, with its specs; None: they are in the data folder.
        index: the traits by which selection finds rows first: an index of its table.
        parameters: attributes of its problems that selection rules may ask for, as ``:name``.
        variant_trait: the trait whose domain ``*`` in a spec means the values that the populated variant has; None:
            its enumerations have no variants.
        axes: words of specs that stand for several traits, whose numbers are joined by x: ``hdim: 128x128``.
        sweep_names: what sweep files call the traits that they may restrict.
        filter_names: further names of traits that filters may use.
        sweep_words: values of traits by what sweep files call them, where that differs, by trait.
        chunk: the traits whose values a sweep is joined for, one after the other.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    kernel: ClassVar[type[Kernel]]
    specs: ClassVar[Path | None] = None
    index: ClassVar[tuple[str, ...]] = ("dtype",)
    parameters: ClassVar[tuple[str, ...]]
    variant_trait: ClassVar[str | None] = None
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    sweep_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    filter_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    sweep_words: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    chunk: ClassVar[tuple[str, ...]] = ("dtype",)

    @property
    def traits(self) -> Traits:
        """The traits of its kernels."""
        return self.kernel.traits

    def read_tile(self, text: str) -> dict[str, Any]:
        """The traits that a tile of a spec states, in the operation's own notation.

        Raises:
            UsageError: ``text`` is no tile.
        """
        raise UsageError(f"{text!r} is not a tile", hint=f"{self.name} has no notation for tiles: use traits.")
