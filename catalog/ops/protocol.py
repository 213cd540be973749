"""What an operation says of itself: everything that the rest of the catalog asks about what kernels compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import BuildError, UsageError
from catalog.schema.arguments import Arguments
from catalog.schema.columns import Column
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.traits import Traits
from catalog.schema.workspace import Workspace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.lineage import Lineage
    from catalog.schema.problem_form import Form


class Operation(ABC):
    """What kernels compute: GEMM, attention, a convolution.

    Attributes:
        name: its word on the command line and in the catalog, a SQL identifier; also the name of its table of traits.
        about: what it computes, in a few words.
        kernel: the model of its rows, with its traits and names.
        specs: a folder like ``data/arch_specs``, with its specs; None: they are in the data folder.
        variant: the column that says which variant of an enumeration a row is of.
        columns: further columns of its view, each with the SQL expression over a row that computes it.
        index: the traits by which selection finds rows first: an index of its table.
        parameters: attributes of its problems that selection rules may ask for, as ``:name``.
        variant_trait: the trait whose domain ``*`` in a spec means the values that the populated variant has; None:
            its enumerations have no variants.
        axes: words of specs that stand for several traits, whose numbers are joined by x: ``hdim: 128x128``.
        sweep_names: what sweep files call the traits that they may restrict.
        filter_names: further names of traits that filters may use.
        sweep_words: values of traits by what sweep files call them, where that differs, by trait.
        listed: the columns that a query shows by default.
        chunk: the traits whose values a sweep is joined for, one after the other.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    kernel: ClassVar[type[Kernel]]
    specs: ClassVar[Path | None] = None
    variant: ClassVar[Column] = Column("variant", "TEXT", "text", "", "variant of the enumeration")
    columns: ClassVar[Mapping[Column, str]] = MappingProxyType({})
    index: ClassVar[tuple[str, ...]] = ("dtype",)
    parameters: ClassVar[tuple[str, ...]]
    variant_trait: ClassVar[str | None] = None
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    sweep_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    filter_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    sweep_words: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    chunk: ClassVar[tuple[str, ...]] = ("dtype",)
    listed: ClassVar[tuple[str, ...]] = ("arch", "family", "dtype", "built", "name")

    @property
    def traits(self) -> Traits:
        """The traits of its kernels."""
        return self.kernel.traits

    def read_tile(self, text: str) -> dict[str, Any]:
        """The traits that a tile of a spec states, in the operation's own notation.

        Raises:
            UsageError: ``text`` is no tile.
        """
        raise UsageError(f"{text!r} is not a tile", hint=f"{self.name} has no notation for tiles: use traits.")

    # Running: what is asked about its problems. Each ``problem`` below is one of the class :attr:`problem`.

    problem: ClassVar[type[Problem]]
    """The model of its problems."""

    arguments: ClassVar[Arguments]
    """The argument struct of its kernels."""

    headers: ClassVar[Mapping[str, Path]] = MappingProxyType({})
    """The include folders of its own headers, by name. Sources include ``folder/header`` below them; one of them has
    ``operation/args.h``, the text of :attr:`Arguments.header`.
    """

    shrinks: ClassVar[Sequence[Callable[[Any, int], Mapping[str, Any]]]] = ()
    """How the problem of a first run is made smaller, in this order until it is small enough: each function gets a
    problem and a length, and returns the fields of a smaller problem with the same traits. An axis that is shortened
    keeps its rest modulo the length, since kernels may depend on what divides it.
    """

    smoke_traits: ClassVar[tuple[str, ...]] = ("dtype",)
    """The traits of a row from which :meth:`smoke_fields` are made; rows are tried in the order of the first."""

    bench_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of problems that are columns of a benchmark's file; none: all."""

    bench_traits: ClassVar[tuple[str, ...]] = ("family",)
    """The traits that come first among those in a benchmark's file."""

    tile_axes: ClassVar[tuple[str, str] | None] = None
    """Two traits over which a report draws speeds as a map."""

    @property
    def main_families(self) -> tuple[str, ...]:
        """The families of kernels that do most of the work of some problem; by default there is one family."""
        return self.traits.families[:1]

    def main_stage(self, problem: Any) -> str:
        """The family of the kernel that does most of the work of ``problem``."""
        return self.main_families[0]

    def stages(self, problem: Any, main: Kernel | None = None) -> tuple[str, ...]:
        """The families of the kernels that run, in order; without the ``main`` kernel those that may."""
        return (self.main_stage(problem),)

    @property
    def required(self) -> tuple[str, ...]:
        """Traits whose values a problem requires, in column order: by default the whole signature."""
        return tuple(trait.name for trait in self.traits.values() if trait.group == "signature")

    def required_traits(self, problem: Any, family: str, lineage: Lineage) -> dict[str, Any]:
        """The :attr:`required` traits of a kernel of ``family`` and ``lineage`` that answers ``problem``.

        By default a trait is the field of the same name, and has its default where there is no such field.
        """
        stated = problem.model_dump(mode="json") | {"family": family}
        return {name: stated.get(name, self.traits[name].default) for name in self.required}

    def splits(self, problem: Any, kernels: Sequence[Kernel], threads: int, *, whole_waves: bool) -> int:
        """Parts that the work of a plan is best divided into; the kernels say how many there will be.

        Args:
            problem: what is computed.
            kernels: those of the plan, in order.
            threads: what the work is divided among: CPU threads, multiprocessors.
            whole_waves: blocks should fill whole waves of the device.
        """
        return 1

    def stated_splits(self, problem: Any) -> int:
        """Parts that the problem itself asks for; 0: none."""
        return 0

    def partial_bytes(self, problem: Any, num_splits: int) -> Mapping[str, int]:
        """Bytes of each partial result with ``num_splits`` parts, by its place in the argument struct."""
        return {}

    def workspace(self, problem: Any, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
        """The workspace with ``num_splits`` parts.

        Args:
            problem: what is computed.
            num_splits: as the kernels agreed.
            insisting: what each kernel says of the workspaces, whose bytes are minima.
        """
        return Workspace(num_splits)

    def draw(self, problem: Any, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """A random input of the shape of tensor ``name``, of any type: by default it is standard normal."""
        import numpy as np

        drawn: NDArray[Any] = rng.standard_normal(problem.shapes[name], dtype=np.float32)
        return drawn

    def complete(self, problem: Any, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The inputs that follow from the others, which takes the reference; by default there are none."""
        return {}

    def check_indices(  # noqa: B027 - most operations have no indices
        self, problem: Any, tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Check lengths and indices, as far as they are among ``tensors``: a kernel reads where they say.

        Raises:
            TensorError: one is out of bounds; says which, and what is allowed.
        """

    def zeroed_outputs(self, form: Form, inputs: Collection[str]) -> frozenset[str]:
        """The outputs that kernels do not fill completely, given inputs of these names: they begin as zeros."""
        return frozenset()

    def pools(self, problem: Any) -> Mapping[str, str]:
        """Inputs that must fit into this machine's memory whoever makes them, and the fields that make them so large.

        Of others the caller's array may repeat elements.
        """
        return {}

    @abstractmethod
    def reference(self, problem: Any, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The results of ``problem`` by name, in float64, as the definition reads.

        Args:
            problem: what is computed.
            inputs: the tensors of a run by name; they are only read, an updated one is a new one among the results.
        """

    @abstractmethod
    def tolerances(
        self, problem: Any, inputs: Mapping[str, NDArray[Any]], *, rounds_products: bool = False
    ) -> dict[str, Tolerance]:
        """How far each result of a correct kernel may be from :meth:`reference`, by the result's name.

        Args:
            problem: what is computed.
            inputs: as for the reference.
            rounds_products: kernels round what they multiply to the type of the inputs, as a GPU's matrix units do.
        """

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """The source of a kernel for a built-in backend: ``host``, ``hip`` or ``cuda``; equal kernels have equal ones.

        Args:
            kernel: the row.
            backend: what compiles it.
            memory: a folder for what may be remembered from one kernel to the next.

        Raises:
            BuildError: there is no such kernel; the message names the trait.
        """
        raise BuildError(f"kernel {kernel.name}: {self.name} has no kernels for the backend {backend}")

    def other_headers(self, backend: str) -> Mapping[str, Path]:
        """Further include folders, of somebody else's headers, by name.

        Raises:
            BuildError: they are not there.
        """
        return {}

    def flags(self, kernel: Kernel, backend: str) -> tuple[str, ...]:
        """Compiler flags that a kernel needs besides those of its toolchain."""
        return ()

    @abstractmethod
    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """The fields of small problems that kernels of ``family``, one of :attr:`main_families`, may answer.

        The first that a kernel answers shows whether the family works; fields that are no problem's are passed over.

        Args:
            family: that of the main stage.
            traits: the :attr:`smoke_traits` of a kernel.
        """

    def label(self, problem: Any) -> str:
        """What a report tells problems apart by, in a word or two: by default the element type."""
        return str(problem.dtype)

    @property
    def short_traits(self) -> tuple[str, ...]:
        """The traits that :meth:`short_name` is made of: by default the algorithm's."""
        return tuple(trait.name for trait in self.traits.values() if trait.group == "algorithm")

    def short_name(self, traits: Mapping[str, Any]) -> str:
        """What tells kernels of one signature apart, in few words: by default what is no default."""
        stated = {name: value for name, value in traits.items() if value != self.traits[name].default}
        return " ".join(value if isinstance(value, str) else f"{name}{value}" for name, value in stated.items())

    def lengths(self, problem: Any) -> Iterator[tuple[str, int]]:
        """The groups of problems that differ in one size only, and that size: each is a line of a report's plot.

        By default there is a group for each of the sizes of a problem.
        """
        for size in problem.sizes:
            others = {name: value for name, value in problem.key_fields(without=(size,)).items() if name != "operation"}
            words = (f"{name}{value}" for name, value in others.items())
            yield "-".join([self.name, *words, f"{size}*"]), getattr(problem, size)
