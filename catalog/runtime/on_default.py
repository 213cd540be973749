"""Methods that use the default catalog when they are called on the class."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

P = ParamSpec("P")
R = TypeVar("R")


class on_default(Generic[P, R]):
    """A method that uses the default catalog when it is called on the class."""

    def __init__(self, function: Callable[Concatenate[Catalog, P], R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Catalog | None, owner: type[Catalog]) -> Callable[P, R]:
        return MethodType(self._function, owner.default() if instance is None else instance)
