"""A problem: one concrete call of an operation, validated and normalised, with a key to look it up."""

from __future__ import annotations

import json
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from catalog.errors import ProblemError
from catalog.messages import did_you_mean
from catalog.schema.arguments import NO_LISTS, Lists
from catalog.schema.derived import derived
from catalog.schema.fields import fields_of
from catalog.schema.problem_form import Form, canonical, form_of
from catalog.schema.problem_tensors import Tensor, TensorForm

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_SIZE = 2**31 - 1
"""Largest extent of an axis: kernels index them with 32 bits."""

MAX_TOTAL = 2**63 - 1
"""Largest FLOP and byte count: the maximum of a SQLite INTEGER."""

MOST_COORDINATES = 5
"""Maximum number of coordinates by which problems are compared: the registry has a column for each."""


def _integer(value: Any) -> int:
    """An int, or a value that converts to one without loss (a NumPy integer). A bool is refused as a mistake."""
    if isinstance(value, bool):
        raise ValueError("a bool is not an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("not an integer") from None


Integer = BeforeValidator(_integer)
"""Validator that converts a caller's integer and refuses a bool."""

Size = Annotated[int, Field(ge=0, le=MAX_SIZE), Integer]
Extent = Annotated[int, Field(ge=1, le=MAX_SIZE), Integer]


def _listed(value: Any) -> Any:
    """Accept a list or tuple; convert arrays to lists. An iterator or a set has no reliable order."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list")
    return value


Listed = BeforeValidator(_listed)
"""Validator that accepts a caller's list, tuple or array."""

Lengths = Annotated[tuple[Size, ...], Listed]


class Problem(BaseModel):
    """A concrete call: sizes, element type, features. Each operation has a subclass, with its fields and tensors.

    A subclass defines fields, :meth:`tensor_forms` and :attr:`flops`, and may override what else follows from the
    fields. After construction the fields hold the normal form: problems that mean the same are equal and have the
    same :attr:`key`. A field that is None takes its default.

    Attributes:
        operation: the name of the operation.
        sizes: fields in which problems of one :attr:`form` may differ. The checks of a call and the kernels that
            answer it are cached by form.
        always_in_key: fields that the key states even at their defaults.
        states_operation: whether the key names the operation.

    Raises:
        ProblemError: a field is unknown, missing or outside its domain, or fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(derived,))

    operation: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ()
    always_in_key: ClassVar[tuple[str, ...]] = ()
    states_operation: ClassVar[bool] = True

    def __init__(self, **fields: Any) -> None:
        known = type(self).model_fields
        for name in fields:
            if name not in known:
                raise ProblemError(
                    f"a problem has no field {name!r}{did_you_mean(name, known)}", hint=f"Fields: {', '.join(known)}."
                )
        try:
            super().__init__(**{name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _explained(type(self), error) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.normalise()
        for quantity, total in (("FLOP", self.flops), ("bytes of tensors", self.bytes)):
            if total > MAX_TOTAL:
                raise ProblemError(f"the sizes multiply to {total:.3g} {quantity}, which do not fit in 63 bits")
        return self

    def normalise(self) -> None:
        """Check that the fields are consistent, and bring them into normal form with :meth:`set_fields`.

        Raises:
            ProblemError: they are not consistent.
        """

    def set_fields(self, **fields: Any) -> None:
        """Change field values. Only for use in :meth:`normalise`: a finished problem is immutable."""
        self.__dict__.update(fields)

    @classmethod
    def of_key(cls, key: str) -> Self:
        """The problem with this :attr:`key`.

        Raises:
            ProblemError: as in the constructor.
        """
        fields = json.loads(key)
        if cls.states_operation:
            fields.pop("operation", None)
        return cls(**fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same problem with other values for some fields, validated like any other problem.

        ``deep`` has no effect because a problem is immutable. The other fields keep their values, even those that came
        from defaults.

        Raises:
            ProblemError: as in the constructor.
        """
        return type(self)(**{**self.model_dump(), **(update or {})})

    def resized(self, **sizes: Any) -> Self:
        """The problem of the same form with these sizes. Sizes not given take their defaults.

        Equal to a new problem with this one's other fields. Where :meth:`sizing` knows that the sizes are valid, it
        takes a tenth of the time.

        Args:
            sizes: fields of :attr:`sizes`.

        Raises:
            ProblemError: as in the constructor.
        """
        return cast("Self", self.form.resized(sizes))

    def sizing(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
        """A function that returns all sizes of a problem of this form, including defaults, if they are certainly valid.

        It may add cached values that follow from the sizes. It returns None where only the constructor can decide.
        """
        return lambda sizes: None

    def borrowing(self) -> Callable[[Problem], Mapping[str, Any] | None]:
        """A function that returns all sizes of another problem, like :meth:`sizing`, if certainly valid here."""
        return lambda other: None

    def without_caches(self) -> Self:
        """The same problem without its cached values."""
        fields = type(self).model_fields
        return cast("Self", type(self).model_construct(**{name: self.__dict__[name] for name in fields}))

    def __deepcopy__(self, memo: Any = None) -> Self:
        return self  # immutable, and its lists hold addresses

    def __reduce__(self) -> tuple[Callable[..., Problem], tuple[type[Problem], str]]:
        return _of_key, (type(self), self.key)  # cached values, the form above all, belong to this process

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Problem) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def form(self) -> Form:
        """What this problem shares with problems that differ only in their sizes."""
        form: Form = self.identity[0]
        return form

    def form_facts(self) -> dict[str, Any]:
        """What the :attr:`sizes` of all problems of the form have in common, as JSON values."""
        return {}

    @derived
    def identity(self) -> tuple[Any, ...]:
        """The form and the sizes: equal exactly when the keys are, and faster to compute."""
        form = form_of(self)
        return form, *form.sizes_of(self.__dict__)

    @derived
    def key(self) -> str:
        """Canonical JSON of the normal form: equal problems have equal keys, and :meth:`of_key` reads them.

        Fields at their defaults are left out.
        """
        return canonical(self.key_fields())

    def key_fields(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The members of :attr:`key` as JSON values, except those named in ``without``."""
        known, always = type(self).model_fields, self.always_in_key
        fields = {
            name: value
            for name, value in self.model_dump(mode="json", exclude_none=True, exclude=set(without)).items()
            if name in always or value != known[name].default
        }
        return fields | {"operation": self.operation} if self.states_operation else fields

    @property
    def name(self) -> str:
        """A short name for people, of letters, digits, ``-``, ``_``, ``.``, ``+`` and ``~``.

        Different problems have different names: a name states the operation and every field that the key states.
        """
        fields = {name: value for name, value in self.key_fields().items() if name != "operation"}
        return "-".join([self.operation, *(_word(name, value) for name, value in fields.items())])

    def kind_fields(self) -> dict[str, Any]:
        """What it shares with all problems that the same kernels answer, as JSON values.

        By default that is all but :attr:`sizes`. Measurements of one problem are evidence for others of its kind.
        """
        return self.key_fields(without=self.sizes)

    @classmethod
    def kind_words(cls, fields: Mapping[str, Any]) -> str:
        """The ``fields`` of :meth:`kind_fields` in words."""
        return " ".join(
            value if name in ("operation", "dtype") else f"{name}={value}" for name, value in fields.items()
        )

    @property
    def coordinates(self) -> tuple[float, ...]:
        """Measures of size: log2(1 + extent) of each size, at most :data:`MOST_COORDINATES` numbers.

        The distance between problems of one kind is Euclidean: doubling the rows moves as far as doubling the columns.
        """
        return tuple([math.log2(1 + extent) for extent in self.extents.values()])

    @property
    def steps(self) -> tuple[int, ...]:
        """The :attr:`coordinates` rounded down: problems with equal steps differ at most twofold in each size."""
        return tuple([(1 + extent).bit_length() - 1 for extent in self.extents.values()])

    @derived
    def extents(self) -> Mapping[str, int]:
        """Extents of the axes in which problems of its form may differ, by name: by default its sizes."""
        return {name: getattr(self, name) for name in self.sizes}

    @derived
    def lists(self) -> Lists:
        """Arrays of int32 that kernels read in addition to tensors, by their slot in the argument struct.

        The first tokens of packed sequences, for one. All problems of a form have them, or none has.
        """
        return NO_LISTS

    @property
    def divided(self) -> bool:
        """Whether its work may be split into parts whose results pass between the stages of a plan.

        That is alike for all problems of a form.
        """
        return False

    @abstractmethod
    def tensor_forms(self) -> Mapping[str, TensorForm]:
        """Every tensor of a run by name: inputs in the order of a call, then outputs.

        Called once per form, on a problem of any sizes. An axis whose extent varies is given as a name of
        :attr:`extents`.
        """
        raise NotImplementedError

    @derived
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor of a run by name: inputs, required ones first, then outputs."""
        return {name: tensor.tensor(self.extents) for name, tensor in self.form.tensors.items()}

    @derived
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that a run needs: required inputs, then outputs. See :attr:`tensors`."""
        return {name: tensor.shape for name, tensor in self.tensors.items() if not tensor.optional}

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the tensors that a run must be given, in the order of a call."""
        return self.form.needed

    @property
    def accepted(self) -> tuple[str, ...]:
        """Names of the tensors that a run may be given, in the order of a call."""
        return self.form.accepted

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the tensors that a run allocates for its results."""
        return self.form.made

    @property
    @abstractmethod
    def flops(self) -> int:
        """FLOP by the operation's convention, as counted in TFLOP/s."""

    @derived
    def bytes(self) -> int:
        """Bytes of all tensors that a run needs."""
        return self.form.bytes_at(self.extents)

    @derived
    def traffic(self) -> int:
        """Minimum memory traffic in bytes: by default every tensor that a run needs is read or written once."""
        return self.bytes


def _of_key(cls: type[Problem], key: str) -> Problem:
    return cls.of_key(key)


def _word(name: str, value: Any) -> str:
    """The text of a field in a name: its value behind its own name, unless that is plain."""
    if name == "dtype" or value is True:
        return str(value if name == "dtype" else name)
    return name + ("_".join(map(str, value)) if isinstance(value, list) else str(value))


def _explained(cls: type[Problem], error: ValidationError) -> ProblemError:
    """The first failure, explained with the field's description."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    value, is_missing, indices = first["input"], first["type"] == "missing", first["loc"][1:]
    field = fields_of(cls)[name]
    if is_missing and not indices:
        return ProblemError(f"a problem needs {name}: {field.about}")
    if field.words:
        meant = did_you_mean(str(value), field.words)
        return ProblemError(f"{name}={value!r} is not allowed{meant}", hint=f"Allowed: {', '.join(field.words)}.")
    element = "" if is_missing else "".join(f"[{index}]" for index in indices)
    expected = f"expected {field.domain}; " if field.domain else ""
    return ProblemError(f"{name}{element}={value!r}: {expected}{field.about}")
