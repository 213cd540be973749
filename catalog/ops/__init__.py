"""Operations: each defines what its kernels compute, behind one protocol, in a folder here or another distribution.

The catalog knows kernels; an operation knows what they compute. Attention, GEMM and convolution are built in. Other
distributions add theirs as entry points of the group ``catalog.operations``, each an instance of
:class:`~catalog.ops.protocol.Operation`. Entry points are loaded only to find a name that is not a built-in
operation's, or to list all operations.

An operation may be extended, too: a distribution adds pipelines to attention as entry points of the group
``catalog.attention.pipelines``, each an instance of :class:`~catalog.ops.protocol.Extension`, and families as entry
points of the group ``catalog.attention.families``, each a :class:`~catalog.ops.protocol.Family`. GEMM and convolution
have such groups, too; so does every operation whose traits have an :class:`~catalog.schema.traits.OpenWord`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import PlainValidator, SerializeAsAny

from catalog.errors import BuildError, ProblemError, RegistryError, UsageError
from catalog.messages import did_you_mean
from catalog.ops.protocol import Emitter, Extension, Operation
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.plugins import Plugin

GROUP = "catalog.operations"
"""The group of entry points."""

DEFAULT = "attention"
"""The operation used where none is stated."""

_TABLES = frozenset(
    (
        *("adopted", "artifact", "device", "foreign_kernel", "foreign_timing", "kernel", "kernel_receipt", "lineage"),
        *("miss", "model", "population", "problem", "rule", "timing", "unknown_name"),
    )
)
"""Names of the catalog's own tables."""

_BUILT_IN = (DEFAULT, "gemm", "conv")
"""The built-in operations: each is a package here whose module ``operation`` defines ``OPERATION``."""


@functools.cache
def operation(name: str = DEFAULT) -> Operation:
    """The operation called ``name``.

    Raises:
        UsageError: there is no such operation.
    """
    if name in _BUILT_IN:
        return cast(Operation, import_module(f"{__name__}.{name}.operation").OPERATION)
    others = {plugin.object.name: plugin.object for plugin in plugins() if plugin.object is not None}
    if name not in others:
        names = sorted({*_BUILT_IN, *others})
        raise UsageError(
            f"no operation is called {name!r}{did_you_mean(name, names)}", hint=f"There are: {', '.join(names)}."
        )
    return others[name]


def operations() -> Iterator[Operation]:
    """All usable operations, the built-in ones first."""
    yield from map(operation, _BUILT_IN)
    yield from (plugin.object for plugin in plugins() if plugin.object is not None)


@functools.cache
def plugins() -> tuple[Plugin[Operation], ...]:
    """The operations of other distributions, looked up once; a warning is logged for each one that cannot be used."""
    from catalog.plugins import find_plugins

    return find_plugins(GROUP, Operation, _objection)


def _objection(_: str, of: Operation, others: Sequence[Plugin[Operation]]) -> str:
    """Why an operation cannot be used beside the built-in ones and ``others``; empty: it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", of.name) or of.name in _TABLES:
        return f"{of.name!r} cannot be the name of a table"
    taken = of.name in {*_BUILT_IN, *(other.object.name for other in others if other.object is not None)}
    return f"there is another operation called {of.name}" if taken else ""


def extensions(of: str = DEFAULT) -> tuple[Plugin[Extension], ...]:
    """What other distributions add to an operation: families, then pipelines.

    Raises:
        UsageError: there is no such operation.
    """
    return tuple(plugin for trait in operation(of).traits.open for plugin in trait.plugins)


def emitters_of(kernel: Kernel) -> tuple[Emitter, ...]:
    """The operation of a kernel, followed by the extensions that its family and its pipeline come from, if any.

    The last one emits the source, which finds the headers of all.

    Raises:
        BuildError: an extension cannot be used.
    """
    of = operation_of(kernel)
    words = ((trait, getattr(getattr(kernel, trait.group), trait.name)) for trait in of.traits.open)
    try:
        added = dict.fromkeys(trait.brought(word) for trait, word in words)
    except RegistryError as error:
        raise BuildError(f"kernel {kernel.name}: {error.message}") from None
    return (of, *(extension for extension in added if extension is not None))


def operation_of(thing: Problem | Kernel) -> Operation:
    """The operation of a problem or a kernel."""
    return operation(thing.operation)


def problem_of(fields: Mapping[str, Any]) -> Problem:
    """The problem with these fields; the member ``operation`` names its operation.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or there is no such operation.
    """
    fields = dict(fields)
    try:
        of = operation(fields.pop("operation", DEFAULT))
    except (UsageError, TypeError) as error:
        raise ProblemError(str(error)) from None
    return of.problem(**fields)


def problem_of_key(key: str) -> Problem:
    """The problem with this key, of any operation.

    Raises:
        ProblemError: as in :func:`problem_of`.
    """
    return problem_of(json.loads(key))


def operation_name(key: str) -> str:
    """The name of the operation of the problem with this key; it need not be installed."""
    return str(json.loads(key).get("operation", DEFAULT))


def kind_words(kind: str) -> str:
    """The kind of a form of any operation, in words."""
    return operation(operation_name(kind)).problem.kind_words(json.loads(kind))


def read_kernel(fields: Any) -> Kernel:
    """The kernel of any operation with the fields of its JSON; a kernel is returned unchanged.

    Raises:
        ValueError: there is no such operation, or a field is missing or outside its domain.
    """
    if isinstance(fields, Kernel):
        return fields
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    try:
        of = operation(fields.get("operation", DEFAULT))
    except (UsageError, TypeError) as error:
        raise ValueError(str(error)) from None
    return of.kernel.model_validate(fields)


AnyKernel = Annotated[SerializeAsAny[Kernel], PlainValidator(read_kernel)]
"""A kernel of any operation, as a field of a model."""
