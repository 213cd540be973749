"""The protocol of foreign implementations: other projects' functions that compute the same problems as our kernels."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar


class Implementation(ABC):
    """A function of another project that computes problems of an operation, on PyTorch tensors.

    It is timed beside our kernels, and compared with the operation's reference first. The module that has it is
    imported only by :meth:`bind`.

    Attributes:
        name: its name on the command line and in the catalog: lower-case letters, digits, ``_`` and ``-``.
        title: the project's name, for people.
        operation: the operation whose problems it computes.
        modules: the modules that must be importable; the first has the function.
        distribution: the distribution whose version identifies what was timed.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    operation: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    distribution: ClassVar[str]

    @property
    def missing(self) -> str:
        """The first of its modules that is not installed; empty if all are. Nothing is imported."""
        return next((name for name in self.modules if importlib.util.find_spec(name) is None), "")

    @property
    def version(self) -> str:
        """The version of the installed distribution; empty if it does not state one."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    @abstractmethod
    def objection(self, problem: Any, place: str) -> str:
        """Why it does not compute ``problem`` on a device; empty if it does.

        Args:
            problem: a problem of :attr:`operation`.
            place: PyTorch's type of the device: ``cpu`` or ``cuda``.
        """

    @abstractmethod
    def bind(self, problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        """A function that computes ``problem`` on these tensors at each call, and returns the results by name.

        Views of the tensors in the function's own layout are made now. Results may be views in the problem's layout; a
        result that the function does not compute is left out.

        Args:
            problem: a problem without :meth:`objection`.
            tensors: the inputs by the names of :attr:`Problem.tensors`, PyTorch tensors on one device.
        """
