"""An attention kernel: one row of the operation."""

from __future__ import annotations

from catalog.errors import UsageError
from catalog.ops.attention.names import grammar_of, parse_name
from catalog.ops.attention.traits import TRAITS, Algorithm, Family, Signature
from catalog.schema.grammar import Grammar
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Lineage


class AttentionKernel(Kernel):
    """A kernel of one of the nine families; its variant is the mask implementation."""

    operation = "attention"
    traits = TRAITS

    signature: Signature
    algorithm: Algorithm

    @classmethod
    def grammar(cls, family: str, lineage: Lineage) -> Grammar:
        """As :func:`~catalog.ops.attention.names.grammar_of`."""
        return grammar_of(family, lineage.known)

    @classmethod
    def family_named(cls, name: str, lineage: Lineage) -> str | None:
        """The family of the kernel called ``name`` at any revision: checkouts may have names of another one."""
        try:
            return str(parse_name(name)["family"])
        except UsageError:
            return None

    @property
    def family(self) -> Family:
        """The family: a shortcut to the trait used most."""
        return self.signature.family
