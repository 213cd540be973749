"""Operations: each defines what its kernels compute, behind one protocol, in a folder here or another distribution.

The catalog knows kernels; an operation knows what they compute. Attention is built in. Other distributions add theirs
as entry points of the group ``catalog.operations``, each an instance of :class:`~catalog.ops.protocol.Operation`. Entry
points are loaded only to find a name that is not a built-in operation's, or to list all operations.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

from pydantic import PlainValidator, SerializeAsAny

from catalog.errors import ProblemError, UsageError
from catalog.messages import did_you_mean
from catalog.ops.protocol import Operation
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

_log = logging.getLogger(__name__)

GROUP = "catalog.operations"
"""The group of entry points."""

DEFAULT = "attention"
"""The operation used where none is stated."""

_TABLES = frozenset(
    ("artifact", "device", "kernel", "kernel_receipt", "lineage", "miss", "population", "problem", "rule", "timing")
)
"""Names of the catalog's own tables."""

_BUILT_IN = (DEFAULT,)
"""The built-in operations: each is a package here whose module ``operation`` defines ``OPERATION``."""


@functools.cache
def operation(name: str = DEFAULT) -> Operation:
    """The operation called ``name``.

    Raises:
        UsageError: there is no such operation.
    """
    if name in _BUILT_IN:
        return cast(Operation, import_module(f"{__name__}.{name}.operation").OPERATION)
    plugins = _plugins()
    if name not in plugins:
        names = sorted({*_BUILT_IN, *plugins})
        raise UsageError(
            f"no operation is called {name!r}{did_you_mean(name, names)}", hint=f"There are: {', '.join(names)}."
        )
    return plugins[name]


def operations() -> Iterator[Operation]:
    """All usable operations, the built-in ones first."""
    yield from map(operation, _BUILT_IN)
    yield from _plugins().values()


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


def kind_words(kind: str) -> str:
    """The kind of a form of any operation, in words."""
    fields = json.loads(kind)
    return operation(fields.get("operation", DEFAULT)).problem.kind_words(fields)


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


@functools.cache
def _plugins() -> dict[str, Operation]:
    """The operations of other distributions, looked up once; a warning is logged for each one that cannot be used."""
    found: dict[str, Operation] = {}
    for point in entry_points(group=GROUP):
        whose = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        try:
            loaded = point.load()
            if not isinstance(loaded, Operation):
                raise TypeError(f"{point.value} is not a catalog.ops.protocol.Operation, but {loaded!r}")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", loaded.name) or loaded.name in _TABLES:
                raise ValueError(f"{loaded.name!r} cannot be the name of a table")
            if loaded.name in {*_BUILT_IN, *found}:
                raise ValueError(f"there is another operation called {loaded.name}")
        except (Exception, SystemExit) as error:  # importing foreign code can raise anything
            _log.warning("operation %s of %s cannot be used: %s: %s", point.name, whose, type(error).__name__, error)
        else:
            found[loaded.name] = loaded
    return found
