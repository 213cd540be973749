"""A cached property for immutable objects: computed on first use, then kept."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    derived = cached_property
else:

    class derived(cached_property):
        """A :func:`functools.cached_property` without the lock that it takes before Python 3.12.

        That lock costs more than computing most derived values. Threads that ask at once may compute a value twice.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
