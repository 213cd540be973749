"""Repeated calls: on other PyTorch tensors with the sizes and strides of an earlier call of the same plan.

Layers of a model call attention with the same sizes and strides, over and over. Only addresses are new then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from catalog.errors import DeviceError

if TYPE_CHECKING:
    from catalog.runtime.devices.fast_path import Means

_MOST_ALIGNED = 16
"""Bytes: addresses must be multiples of what divides those of the earlier call, up to this."""
_ALIGNED_PARTS = 256
"""Bytes: partial results that share memory begin at multiples of this."""
_WORD = 8
"""Bytes of an address."""


@dataclass(frozen=True, eq=False, slots=True)
class Order:
    """Another order of axes, in which a caller has some tensors and wants some results.

    ``axes`` has their own axes in that order, by name. Axes trade places in pairs, so that the same order leads back.
    """

    axes: Mapping[str, tuple[int, ...]]

    def applied(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Views of the tensors in the other order."""
        return {name: self.view(name, tensor) for name, tensor in tensors.items()}

    def view(self, name: str, tensor: Any) -> Any:
        """The tensor ``name`` in the other order."""
        axes = self.axes.get(name)
        return tensor if axes is None else tensor.permute(axes)

    def maker(self, name: str, make: partial[Any], torch: Any) -> Callable[[], Any]:
        """A function that makes the tensor ``name`` in the other order, in the memory that ``make`` allocates."""
        axes = self.axes.get(name)
        if axes is None:
            return make
        if make.func is not torch.empty:
            return lambda: make().permute(axes)
        like = make().permute(axes)
        return partial(torch.empty_strided, tuple(like.shape), like.stride(), **make.keywords)


IN_ORDER = Order({})
"""The order of a problem's own tensors."""

_module: Any = None


def use(module: Any) -> None:
    """Let calls that are kept from now on repeat by the compiled ``module`` (:mod:`catalog.torch.native`)."""
    global _module  # noqa: PLW0603
    _module = module


class KnownCall:
    """Repeats a call on tensors that differ from the earlier ones only in address; outputs are new each time.

    Args:
        means: what the device does for it.
        args: the argument struct of the earlier call, which the kernels accepted.
        start: starts the kernels on the address of arguments.
        entries: the addresses of the kernels' entry points, where nothing else is to be done to start them; else empty.
        inputs: the tensors of that call by name, and the offsets of their addresses in the struct.
        outputs: what makes each result, by name, and the offset of its address.
        order: that of the tensors of later calls, and of their results.
        updated: the inputs that are results, too.
        partials: the offsets of the addresses of partial results, and their bytes.
    """

    __slots__ = (
        "_facts_of",
        "_inputs",
        "_names",
        "_outputs",
        "_parts",
        "_repeats",
        "_results",
        "_room",
        "_start",
        "_tensor",
        "_updated",
        "_words",
        "misses",
        "repeated",
    )

    def __init__(
        self,
        means: Means,
        args: Any,
        start: Callable[[int], None],
        *,
        entries: Sequence[int],
        inputs: Sequence[tuple[str, Any, int]],
        outputs: Iterable[tuple[str, partial[Any], int]],
        order: Order,
        updated: Iterable[str],
        partials: Iterable[tuple[int, int]],
    ) -> None:
        self.misses = 0
        self._tensor, self._repeats, self._start = means.torch.Tensor, means.repeats, start
        self._facts_of = attrgetter("shape", "dtype", means.where[0], "layout")
        self._words = array("Q", bytes(args))
        self._names = [name for name, _, _ in inputs]
        views = [(order.view(name, tensor), offset) for name, tensor, offset in inputs]
        self._inputs = [
            (self._facts_of(tensor), tensor.stride(), _alignment(tensor) - 1, offset // _WORD)
            for tensor, offset in views
        ]
        self._outputs = [
            (name, order.maker(name, make, means.torch), offset // _WORD) for name, make, offset in outputs
        ]
        self._updated = tuple(updated)
        self._parts: list[tuple[int, int]] = []
        size = 0
        for offset, bytes_ in partials:
            self._parts.append((offset // _WORD, size))
            size += -(-bytes_ // _ALIGNED_PARTS) * _ALIGNED_PARTS
        self._room = partial(means.scratch, size)
        self._results = tuple(name for name, _, _ in self._outputs)
        self.repeated = None
        if _module is not None and entries and not self._updated:
            self.repeated = self._compiled(views, size, entries, (means.torch.empty, means.torch.empty_strided))

    def _compiled(
        self, views: Sequence[tuple[Any, int]], room: int, entries: Sequence[int], fresh: Sequence[Callable[..., Any]]
    ) -> Any:
        """The compiled call that does what this one does; None where a result is not ``fresh``, but begins as zeros."""
        makers = [make for _, make, _ in self._outputs]
        if not all(isinstance(make, partial) and make.func in fresh for make in makers):
            return None
        inputs = [(view, place, below) for (view, _), (_, _, below, place) in zip(views, self._inputs, strict=True)]
        outputs = [(make(), place) for _, make, place in self._outputs]
        return _module.Repeated(
            bytes(self._words), tuple(inputs), tuple(outputs), tuple(self._parts), room, tuple(entries), self._start
        )

    def __call__(self, given: Mapping[str, Any], differentiated: bool) -> dict[str, Any] | None:
        """The results; None if a tensor is not like the earlier call's, or as :class:`~.fast_path.FastPath` says.

        Raises:
            DeviceError: as :class:`~.fast_path.FastPath`.
        """
        if list(given) != self._names:
            return None
        if self.repeated is not None:
            results = self.repeated(tuple(given.values()), differentiated)
            return None if results is None else dict(zip(self._results, results, strict=True))
        tensor_type, facts_of, words = self._tensor, self._facts_of, self._words[:]
        for tensor, (facts, strides, below, place) in zip(given.values(), self._inputs, strict=True):
            if (
                type(tensor) is not tensor_type
                or facts_of(tensor) != facts
                or tensor.stride() != strides
                or tensor.is_neg()
            ):
                return None
            address = tensor.data_ptr()
            if address & below or not address or (not differentiated and tensor.requires_grad):
                return None
            words[place] = address
        made = {}
        for name, make, place in self._outputs:
            tensor = made[name] = make()
            words[place] = tensor.data_ptr()
        if self._parts:
            room = self._room()
            base = room.data_ptr()
            for place, offset in self._parts:
                words[place] = base + offset
        try:
            self._start(words.buffer_info()[0])
        except DeviceError:
            if not self._repeats:
                raise
            return None
        for name in self._updated:
            made[name] = given[name]
        return made


def _alignment(tensor: Any) -> int:
    """The largest power of two, up to :data:`_MOST_ALIGNED`, that divides the tensor's address."""
    address: int = tensor.data_ptr() | _MOST_ALIGNED
    return address & -address
