"""A convolution kernel: one row of the operation."""

from __future__ import annotations

from catalog.ops.conv.names import grammar_of
from catalog.ops.conv.traits import TRAITS, Algorithm, Signature
from catalog.schema.grammar import Grammar
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Lineage


class ConvKernel(Kernel):
    """A kernel of one of the families; its space is the generator that lists it."""

    operation = "conv"
    traits = TRAITS

    signature: Signature
    algorithm: Algorithm

    @classmethod
    def grammar(cls, family: str, lineage: Lineage) -> Grammar:
        """As :func:`~catalog.ops.conv.names.grammar_of`."""
        return grammar_of(family, lineage)
