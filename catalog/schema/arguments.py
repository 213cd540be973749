"""The argument struct of an operation: one list of fields gives the ctypes structure and the C header.

Every struct begins with its size and the number of the ABI, which kernels compare first, and ends with the number of
threads and their pool. In between are tensors, addresses of int32 arrays, sizes (int64) and scalars, in this order.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Literal

ABI_VERSION = 5
"""CATALOG_ABI_VERSION of ``build/abi/catalog_abi.h``."""

_LINE = 120
_PREFIX = (
    ("uint32_t", "struct_bytes", "sizeof(catalog_args) as the caller compiled it"),
    ("uint32_t", "abi_version", "CATALOG_ABI_VERSION"),
)
_POOL = "struct catalog_pool*"
_THREADS = (
    ("int32_t", "num_threads", "host targets: 0 = every core that the process may use"),
    ("int32_t", "reserved", "0"),
    (_POOL, "pool", "host targets: the threads of the process; NULL = those of the library"),
)
_C_TYPES: Mapping[str, Any] = MappingProxyType({"int32": ctypes.c_int32, "float32": ctypes.c_float})
_C_NAMES: Mapping[str, str] = MappingProxyType({"int32": "int32_t", "float32": "float"})


@dataclass(frozen=True, slots=True)
class Size:
    """An int64.

    Attributes:
        name: in the struct.
        about: its comment.
        source: the attribute of a problem that it holds, 0 for None; empty: the one of this name. It is one of
            :attr:`Problem.extents`, or the same for all problems of a form.
        extent_of: the tensor whose first extent it holds instead, where a run has that tensor.
    """

    name: str
    about: str = ""
    source: str = ""
    extent_of: str = ""

    @property
    def attribute(self) -> str:
        """The attribute of a problem that it holds."""
        return self.source or self.name


@dataclass(frozen=True, slots=True)
class Scalar:
    """An int32 or float32 that problems of one form share; ``source`` as of :class:`Size`."""

    name: str
    type: Literal["int32", "float32"]
    about: str = ""
    source: str = ""

    @property
    def attribute(self) -> str:
        """The attribute of a problem that it holds."""
        return self.source or self.name


class Lists:
    """The int32 arrays of a problem, by their place in the argument struct; None for those that it lacks.

    Attributes:
        arrays: those that there are.
        addresses: of all, in the host's memory; 0 for those that there are not.
    """

    __slots__ = ("addresses", "arrays")

    def __init__(self, **arrays: array[int] | None) -> None:
        self.arrays = {name: values for name, values in arrays.items() if values is not None}
        self.addresses = tuple([0 if values is None else values.buffer_info()[0] for values in arrays.values()])

    def __bool__(self) -> bool:
        return bool(self.arrays)


NO_LISTS = Lists()
"""The lists of most problems: none."""

NUM_SPLITS = "num_splits"
"""The size that holds the parts which the stages of a plan agree on; 1 where the work is not divided."""


class Arguments:
    """The argument struct of an operation, and the one by which a kernel says how large workspaces are.

    Args:
        strides: what tensors are strided along; the struct of a tensor has its address, then ``stride_<name>`` each.
        tensors: the places of tensors, with their comments, in order. A key that begins with ``#`` is a heading: its
            text stands above those that follow.
        lists: the places of int32 arrays that follow from the sizes of a problem, in the order of :class:`Lists`.
        host_lists: whether launches read ``lists`` themselves, in host memory; otherwise kernels do, in the device's.
        sizes: int64 fields.
        scalars: int32 and float32 fields.
        workspaces: those of ``tensors`` where stages hand partial results to each other.
        constants: C enums by name: the values with their comments.
        about: what the header says first.
    """

    def __init__(
        self,
        strides: Mapping[str, str],
        tensors: Mapping[str, str],
        sizes: Sequence[Size],
        scalars: Sequence[Scalar] = (),
        *,
        lists: Mapping[str, str] = MappingProxyType({}),
        host_lists: bool = False,
        workspaces: tuple[str, ...] = (),
        constants: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        about: str = "",
    ) -> None:
        self.sizes, self.scalars, self.lists, self.workspaces = tuple(sizes), tuple(scalars), tuple(lists), workspaces
        self.host_lists = host_lists
        self.slots = tuple(name for name in tensors if not name.startswith("#"))
        self.extents_of = {size.name: size.extent_of for size in sizes if size.extent_of}
        self._strides, self._tensors, self._lists = strides, tensors, lists
        self._constants, self._about = constants, about
        long, integer = ctypes.c_int64, ctypes.c_int32
        self.tensor: Any = _structure(
            "catalog_tensor", [("data", ctypes.c_void_p), *((f"stride_{name}", long) for name in strides)]
        )
        self.args: Any = _structure(
            "catalog_args",
            [
                *((name, ctypes.c_uint32) for _, name, _ in _PREFIX),
                *((name, self.tensor) for name in self.slots),
                *((name, ctypes.c_void_p) for name in lists),
                *((size.name, long) for size in sizes),
                *((scalar.name, _C_TYPES[scalar.type]) for scalar in scalars),
                *((name, ctypes.c_void_p if type_ == _POOL else integer) for type_, name, _ in _THREADS),
            ],
        )
        self.workspace: Any = _structure("catalog_workspace", [(name, long) for name in (NUM_SPLITS, *workspaces)])
        self.offsets: Mapping[str, int] = MappingProxyType(
            {name: getattr(self.args, name).offset for name in (*self.slots, *lists)}
        )
        self.most_strides = len(strides)
        self.address_format = Struct("@P")
        self.tensor_format = Struct("@P" + "q" * len(strides))
        self.lists_format = Struct("@" + "P" * len(lists))
        self.lists_offset: int = self.offsets[self.lists[0]] if lists else 0
        self.sizes_format = Struct("@" + "q" * len(sizes))
        self.sizes_offset: int = getattr(self.args, self.sizes[0].name).offset if sizes else 0

    def new(self, **fields: Any) -> Any:
        """A struct whose size and ABI are stated, with these fields."""
        return self.args(struct_bytes=ctypes.sizeof(self.args), abi_version=ABI_VERSION, **fields)

    def sizes_of(self, blank: Any) -> tuple[str | int, ...]:
        """The sizes of problems with the form of ``blank``, in order: a name of :attr:`Problem.extents`, or a number.

        It is 0 where only tensors have the size.
        """
        return tuple(self._size_of(size, blank) for size in self.sizes)

    def _size_of(self, size: Size, blank: Any) -> str | int:
        if size.name == NUM_SPLITS:
            return 1
        if size.extent_of:
            return 0
        return size.attribute if size.attribute in blank.extents else int(getattr(blank, size.attribute) or 0)

    @property
    def header(self) -> str:
        """The C header, ``operation/args.h``, which ``abi/catalog_abi.h`` includes."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _comment(f"{self._about} Generated from the operation's list of fields; do not edit.".strip(), "")
        yield from ("#ifndef CATALOG_ARGS_H", "#define CATALOG_ARGS_H", "", "#include <stdint.h>", "")
        strides = [("int64_t", f"stride_{name}", about) for name, about in self._strides.items()]
        yield from _struct("catalog_tensor", _members([("void*", "data", ""), *strides]))
        for name, values in self._constants.items():
            yield f"enum {name} {{"
            for number, (value, about) in enumerate(values.items()):
                yield f"    {value} = {number}, /* {about} */"
            yield from ("};", "")
        yield from _struct("catalog_args", self._fields())
        sizes = [("int64_t", NUM_SPLITS, "what args->num_splits must be for the launch")]
        sizes += [("int64_t", name, "") for name in self.workspaces]
        yield "/* Bytes that a launch uses of each workspace, 0 of one that it does not use. */"
        yield from _struct("catalog_workspace", _members(sizes))
        yield "#endif /* CATALOG_ARGS_H */"

    def _fields(self) -> Iterator[str]:
        yield from _members(_PREFIX)
        if not next(iter(self._tensors), "#").startswith("#"):
            yield ""
        for name, about in self._tensors.items():
            if name.startswith("#"):
                yield from ("", *_comment(about, "    "))
            else:
                yield from _members([("catalog_tensor", name, about)])
        if self._lists:
            yield ""
            yield from _members(("const int32_t*", name, about) for name, about in self._lists.items())
        yield ""
        yield from _members(("int64_t", size.name, size.about) for size in self.sizes)
        yield ""
        yield from _members((_C_NAMES[scalar.type], scalar.name, scalar.about) for scalar in self.scalars)
        yield from _members(_THREADS)


def _structure(name: str, fields: Sequence[tuple[str, Any]]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields)})


def _struct(name: str, members: Iterable[str]) -> Iterator[str]:
    yield from (f"typedef struct {name} {{", *members, f"}} {name};", "")


def _members(members: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    for type_, name, about in members:
        declared = f"    {type_} {name};"
        if not about or len(declared) + len(about) + 7 <= _LINE:
            yield f"{declared} /* {about} */" if about else declared
        else:
            yield from (*_comment(about, "    "), declared)


def _comment(text: str, indent: str) -> Iterator[str]:
    first, *others = wrap(text, _LINE - len(indent) - 6) or [""]
    if not others:
        yield f"{indent}/* {first} */"
        return
    yield f"{indent}/* {first}"
    yield from (f"{indent} * {line}" for line in others[:-1])
    yield f"{indent} * {others[-1]} */"
