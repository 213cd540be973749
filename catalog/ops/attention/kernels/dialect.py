"""Sources for our own kernel headers: a row's traits as a C++ struct, with the names that a target's headers use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from catalog.build.describe import c_string
from catalog.build.row_source import row_source
from catalog.errors import BuildError
from catalog.ops.attention.fields import ELEMENTS
from catalog.ops.attention.stages import WORKSPACES, workspaces_of
from catalog.ops.attention.traits import TRAITS, Dtype, Pipeline, Signature
from catalog.schema.kernel import Kernel

_ALIASES = MappingProxyType({"no": "none", "mask": "generic"})
_PADS = ("pad_s", "pad_sk", "pad_d", "pad_dv")


@dataclass(frozen=True)
class Dialect:
    """How a target's kernel headers spell traits.

    Attributes:
        title: the target's name in messages.
        folder: folder of the headers, and namespace of their definitions.
        dtypes: those that the headers implement.
        elements: their elements' C++ types, by NumPy's or ml_dtypes' names.
        enums: types of the traits that the headers know by the same name.
        unknown: values of those types that the headers do not implement.
        pipelines: those that share a header, which finds the row's own in the struct.
        numbers: traits of the algorithm that are members of the struct.
        sized: headers that compute the size of workspaces themselves, in a function workspace_size_<name>.
        footer: source after the exported functions.
    """

    title: str
    folder: str
    dtypes: Collection[Dtype]
    elements: Mapping[str, str]
    enums: tuple[type[Enum], ...]
    unknown: frozenset[str]
    numbers: tuple[str, ...]
    pipelines: frozenset[Pipeline] = frozenset()
    sized: frozenset[str] = frozenset()
    footer: str = ""

    def source(self, kernel: Kernel, header: str) -> str:
        """The C++ source of ``kernel``, launched by the function that ``header`` defines; equal kernels, equal sources.

        ``header`` is a path below :attr:`folder`, without its suffix.

        Raises:
            BuildError: the headers do not implement the kernel; the message names the trait.
        """
        name = header.rpartition("/")[2]
        launch = f"catalog::{self.folder}::launch_{name}<Row>"
        export = f"CATALOG_EXPORT({launch}"
        if header in self.sized:
            export = f"CATALOG_EXPORT_SIZED({launch}, catalog::{self.folder}::workspace_size_{name}<Row>"
        exports = f"{export}, {c_string(kernel)}, {uses(kernel)})\n{self.footer}"
        return row_source(kernel, f"{self.folder}/{header}.hpp", self._members(kernel), exports)

    def _members(self, kernel: Kernel) -> list[str]:
        signature = kernel.signature
        if signature.dtype not in self.dtypes:
            raise BuildError(f"kernel {kernel.name}: {self.title} has no kernels for dtype = {signature.dtype}")
        elements = ELEMENTS[signature.dtype]
        row = kernel.to_row()
        members = [f"using dtype = {self.elements[elements.kv]};", f"using otype = {self.elements[elements.o]};"]
        if elements.q != elements.kv:
            members.append(f"using qtype = {self.elements[elements.q]};")
        members += [
            self._member(kernel, name, getattr(signature, name))
            for name in Signature.model_fields
            if name not in ("family", "dtype")
        ]
        if kernel.algorithm.pipeline in self.pipelines:
            members.append(f"static constexpr auto pipeline = {self._cpp(kernel.algorithm.pipeline)};")
        members += [f"static constexpr int {name} = {row[name]};" for name in self.numbers if row[name]]
        members += [f"static constexpr bool {name} = {str(bool(row[name])).lower()};" for name in _PADS]
        return [member for member in members if member]

    def _member(self, kernel: Kernel, name: str, value: object) -> str:
        """One trait of the signature as a member of the C++ struct."""
        if isinstance(value, bool):
            return f"static constexpr bool {name} = {str(value).lower()};"
        if isinstance(value, int):
            return f"static constexpr int {name} = {value};"
        if isinstance(value, self.enums) and value.value not in self.unknown:
            return f"static constexpr auto {name} = {self._cpp(value)};"
        if value == TRAITS[name].default:
            return ""
        raise BuildError(f"kernel {kernel.name}: {self.title} has no kernels for {name} = {value}")

    def _cpp(self, value: Enum) -> str:
        return f"catalog::{self.folder}::{type(value).__name__}::{_ALIASES.get(value.value, value.value)}"


def uses(kernel: Kernel) -> str:
    """The initializers of the C++ struct ``catalog::Uses``."""
    used = workspaces_of(kernel)
    return ", ".join(str(name in used).lower() for name in WORKSPACES)
