"""The protocol of operations: everything that the rest of the catalog asks about what kernels compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import BuildError, UsageError
from catalog.ops.implementation import Implementation
from catalog.schema.arguments import Arguments
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.columns import Column
from catalog.schema.deployment import Deployment
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.traits import Traits
from catalog.schema.workspace import Workspace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.build.generators import Generator
    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.grammar import Grammar
    from catalog.schema.lineage import Lineage
    from catalog.schema.problem_form import Form


RECEIPT = "receipt"
"""The word for receipts among the traits that divide lists."""

_MOST_SPLITS = 4096
"""More than any operation divides its work into: a few parts are chosen per thread."""


class Emitter:
    """What makes the sources of kernels.

    Attributes:
        headers: the include folders of its own headers, by name. Sources include ``folder/header`` below them.
    """

    headers: ClassVar[Mapping[str, Path]] = MappingProxyType({})

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """The source of a kernel for a built-in backend: ``host``, ``hip`` or ``cuda``; equal kernels, equal sources.

        Args:
            kernel: the row.
            backend: the backend that compiles it.
            memory: a folder for results that may be reused for other kernels.

        Raises:
            BuildError: the backend does not implement the kernel; the message names the trait.
        """
        raise BuildError(f"kernel {kernel.name}: {kernel.operation} has no kernels for the backend {backend}")

    def other_headers(self, backend: str) -> Mapping[str, Path]:
        """Include folders of headers from elsewhere, by name.

        Raises:
            BuildError: the headers are missing.
        """
        return {}

    def headers_revisions(self, kernel: Kernel) -> tuple[str, ...]:
        """The revisions of upstream's headers that may compile a row: for a row that upstream lists, its own."""
        return (kernel.revision,)

    def flags(self, kernel: Kernel, backend: str) -> tuple[str, ...]:
        """Compiler flags that a kernel needs in addition to those of its toolchain."""
        return ()


class Extension(Emitter):
    """Kernels that another distribution adds to an operation, and that answer the same problems: its pipelines.

    The name of its entry point is the pipeline's; several entry points may name one extension.

    A file ``REVISION/NAME.json`` in :attr:`specs` adds enumerations and rules of selection to the operation's spec of
    that name. Sources find the operation's headers, too, so :attr:`headers` needs other names.

    Attributes:
        about: what it adds, in a few words.
        specs: a folder like ``data/arch_specs``; None if its kernels are those of an arch of its own.
    """

    about: ClassVar[str] = ""
    specs: ClassVar[Path | None] = None

    def objection(self, own: Collection[str]) -> str:
        """Why it cannot be used in an operation whose ``own`` words it adds to; empty: it can."""
        return ""


class Family(Extension, ABC):
    """A family that another distribution adds to an operation: kernels with names, rules and stages of their own.

    The name of its entry point is the family's. Its kernels do most of the work of a plan, in competition with those of
    the operation's family that it stands beside: what was measured decides, otherwise the :attr:`order`.

    Attributes:
        beside: the operation's families whose problems it answers, too. Which of these problems its kernels answer
            depends on their signature and on the rules of selection in its :attr:`specs`.
        before: the operation's families that run before its kernels in a plan.
        after: the operation's families that run after them.
        order: place among the families that answer a problem, while nothing is measured; the operation's own has 0.
    """

    beside: ClassVar[tuple[str, ...]]
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 1

    @abstractmethod
    def grammar(self, family: str, lineage: Lineage) -> Grammar:
        """How the kernels of the family are named in the enumeration ``lineage``."""

    def smoke_fields(
        self, problems: Iterable[Mapping[str, Any]], traits: Mapping[str, Any]
    ) -> Iterable[Mapping[str, Any]]:
        """Fields of small problems that its kernels may answer, as :meth:`Operation.smoke_fields`.

        Args:
            problems: those of the families that it stands :attr:`beside`: the default.
            traits: the :attr:`Operation.smoke_traits` of a kernel.
        """
        return problems

    def objection(self, own: Collection[str]) -> str:
        """The families that it names and the operation lacks."""
        unknown = sorted({*self.beside, *self.before, *self.after}.difference(own))
        return f"the operation has no family {unknown[0]}; it has {', '.join(sorted(own))}" if unknown else ""


class Operation(Emitter, ABC):
    """What kernels compute: GEMM, attention, a convolution.

    Attributes:
        name: its name on the command line and in the catalog: an SQL identifier, and the name of its table of traits.
        about: what it computes, in a few words.
        kernel: the model of its rows, with its traits and names.
        specs: a folder like ``data/arch_specs`` with its specs; None if they are in the data folder: attention's are
            there, others are in a subfolder with the operation's name.
        main_space: the space of its specs in the folders of upstream's revisions.
        headers: as in :class:`Emitter`; one contains ``operation/args.h``, the text of :attr:`Arguments.header`.
        variant: the column that states a row's variant of the enumeration.
        columns: additional columns of its view, each with the SQL expression that computes it from a row.
        index: the traits by which selection looks up rows first: an index of its table.
        parameters: what selection rules may use of its problems, as ``:name``; see :meth:`parameter`.
        varying: the parameters that depend on the sizes of a problem and are not among its extents.
        variants: what the variants of its enumerations differ in, in a word; empty if there are none.
        variant_trait: the trait whose domain ``*`` in a spec means the values of the populated variant; None if its
            enumerations have no variants.
        axes: words in specs that stand for several traits, with numbers joined by x: ``hdim: 128x128``.
        sweep_names: names that sweep files use for the traits that they may restrict.
        filter_names: additional names of traits that filters may use.
        sweep_words: by trait, values under the names that sweep files use, where these differ.
        listed: the columns that a query shows by default.
        chunk: the traits over whose values a sweep is joined in parts.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    kernel: ClassVar[type[Kernel]]
    specs: ClassVar[Path | None] = None
    main_space: ClassVar[str] = "native"
    variant: ClassVar[Column] = Column("variant", "TEXT", "text", "", "variant of the enumeration")
    columns: ClassVar[Mapping[Column, str]] = MappingProxyType({})
    index: ClassVar[tuple[str, ...]] = ("dtype",)
    parameters: ClassVar[tuple[str, ...]]
    varying: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[str] = ""
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

    lists: ClassVar[tuple[str, ...]] = ()
    """What the kernels of one of upstream's lists have in common, if parity compares lists of names: traits, and
    :data:`RECEIPT` for the first name of the receipt.

    The runs of its :meth:`generator` state these traits. Empty: parity compares receipts.
    """

    def about_variant(self, variant: str) -> str:
        """The end of a remark about kernels of ``variant``: ``, masks generic``; empty without variants."""
        return f", {self.variants} {variant}" if self.variants else ""

    def instances(self, document: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
        """The kernels that a configuration of upstream's lists one by one: a relation of the specs, and its rows.

        ``catalog populate --config`` joins only the enumerations of this relation. None, as by default, for other
        configurations, which state axes.

        Raises:
            UsageError: the configuration is wrong; the message says where.
        """
        return None

    def generator(self, root: Path, timeout: float) -> Generator:
        """The generator of the checkout at ``root``, which lists its own kernels; ``timeout`` in seconds for a run.

        Parity compares its lists with the catalog's rows, and adoption makes rows of them.

        Raises:
            UsageError: there is none at ``root``, or there are several, or the operation has none.
        """
        raise UsageError(f"{self.name} has no upstream generator: no checkout lists its kernels")

    def checkout_revision(self) -> str | None:
        """The revision whose rows the user's checkout of upstream compiles; None, as by default, if any revision's.

        Raises:
            BuildError: there is no checkout.
        """
        return None

    def fallback(self) -> tuple[str, str]:
        """The revision and the traits, as an SQL expression, of a kernel of upstream that is known to compile.

        Raises:
            UsageError: the operation has none.
            BuildError: there is no checkout.
        """
        raise UsageError(f"{self.name} has no kernels of upstream that can be built")

    def read_tile(self, text: str) -> dict[str, Any]:
        """The traits stated by a tile of a spec, in the operation's own notation.

        Raises:
            UsageError: ``text`` is not a tile.
        """
        raise UsageError(f"{text!r} is not a tile", hint=f"{self.name} has no notation for tiles: use traits.")

    # Running: methods about its problems. Each ``problem`` below is an instance of the class :attr:`problem`.

    problem: ClassVar[type[Problem]]
    """The model of its problems."""

    arguments: ClassVar[Arguments]
    """The argument struct of its kernels."""

    shrinks: ClassVar[Sequence[Callable[[Any, int], Mapping[str, Any]]]] = ()
    """Functions that make the problem of a first run smaller, applied in order until it is small enough. Each takes a
    problem and a length, and returns the fields of a smaller problem with the same traits. A shortened axis keeps its
    remainder modulo the length, because kernels may depend on divisibility.
    """

    smoke_traits: ClassVar[tuple[str, ...]] = ("dtype",)
    """The traits of a row that :meth:`smoke_fields` needs; rows are tried in the order of the first one."""

    bench_fields: ClassVar[tuple[str, ...]] = ()
    """The columns of a benchmark's file that state the problem: by default its fields, all of them if empty."""

    bench_traits: ClassVar[tuple[str, ...]] = ("family",)
    """The traits that come first in a benchmark's file."""

    tile_axes: ClassVar[tuple[str, str] | None] = None
    """Two traits over which a report plots speeds as a map."""

    def bench_values(self, problem: Any) -> Mapping[str, Any]:
        """The values of the columns :attr:`bench_fields` for ``problem``, and maybe others."""
        values: dict[str, Any] = problem.model_dump(mode="json")
        return values

    @property
    def main_families(self) -> tuple[str, ...]:
        """The families of kernels that do most of the work of some problem; by default the only family."""
        return self.traits.families[:1]

    def main_stage(self, problem: Any) -> str:
        """The family of the kernel that does most of the work of ``problem``."""
        return self.main_families[0]

    def stages(self, problem: Any, main: Kernel | None = None) -> tuple[str, ...]:
        """The families of the kernels that run, in order; without the ``main`` kernel, those that may run."""
        return (self.main_stage(problem),)

    @property
    def required(self) -> tuple[str, ...]:
        """Traits whose values a problem requires, in column order: by default the whole signature."""
        return tuple(trait.name for trait in self.traits.values() if trait.group == "signature")

    def parameter(self, problem: Any, name: str) -> Any:
        """The value of one of :attr:`parameters` for a problem: by default its attribute of that name.

        Selection asks only for those that the rules of an arch name.
        """
        return getattr(problem, name)

    def required_traits(self, problem: Any, family: str, lineage: Lineage) -> dict[str, Any]:
        """The :attr:`required` traits for kernels of ``family`` and ``lineage`` that answer ``problem``.

        By default a trait takes the value of the problem's field of the same name, or its default without such a field.
        """
        stated = problem.model_dump(mode="json") | {"family": family}
        return {name: stated.get(name, self.traits[name].default) for name in self.required}

    def splits(self, problem: Any, kernels: Sequence[Kernel], threads: int, *, whole_waves: bool) -> int:
        """The best number of parts for the work of a plan; the kernels decide the actual number.

        Args:
            problem: the problem to compute.
            kernels: the kernels of the plan, in order.
            threads: number of CPU threads or multiprocessors that share the work.
            whole_waves: whether blocks should fill whole waves of the device.
        """
        return 1

    def work(self, problem: Any, kernel: Any, units: int) -> Mapping[str, float]:
        """The terms of the time of a kernel, by name: the time is their sum, each multiplied by a factor from 0.

        ``catalog learn`` fits the factors on timings (:mod:`catalog.runtime.cost_model`). A term that a kernel lacks
        counts as 0. By default there are a constant, the FLOP, the memory traffic, and each extent of the problem.

        Args:
            problem: the problem to compute.
            kernel: the kernel that does most of the work.
            units: number of CPU threads or multiprocessors that share the work.
        """
        extents = {name: float(extent) for name, extent in problem.extents.items()}
        return {"launch": 1.0, "flops": problem.flops / units, "traffic": float(problem.traffic), **extents}

    def stated_splits(self, problem: Any) -> int:
        """The number of parts that the problem itself asks for; 0 for none."""
        return 0

    def most_splits(self, problem: Any) -> int:
        """An upper bound of :meth:`splits`, for any kernels and threads."""
        return self.stated_splits(problem) or _MOST_SPLITS

    def partial_bytes(self, problem: Any, num_splits: int) -> Mapping[str, int]:
        """Bytes of each partial result with ``num_splits`` parts, by its slot in the argument struct."""
        return {}

    def workspace(self, problem: Any, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
        """The workspace with ``num_splits`` parts.

        Args:
            problem: the problem to compute.
            num_splits: the number that the kernels agreed on.
            insisting: each kernel's own requirements for workspaces, whose bytes are minima.
        """
        return Workspace(num_splits)

    def draw(self, problem: Any, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """A random input for tensor ``name``, in its shape and any type: by default standard normal."""
        import numpy as np

        drawn: NDArray[Any] = rng.standard_normal(problem.shapes[name], dtype=np.float32)
        return drawn

    def complete(self, problem: Any, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The inputs that follow from the others by the reference; by default there are none."""
        return {}

    kernels_check_values: ClassVar[bool] = False
    """Whether each launch on the host checks what :meth:`check_values` does, and rejects a call before it writes."""

    def check_values(self, problem: Any, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Check the values of ``tensors`` that kernels trust: for example indices, because they read where these point.

        Raises:
            TensorError: one is not allowed; the message says which, and what is allowed.
        """

    def zeroed_outputs(self, form: Form, inputs: Collection[str]) -> frozenset[str]:
        """The outputs that kernels do not fill completely, given inputs of these names: they start as zeros."""
        return frozenset()

    def pools(self, problem: Any) -> Mapping[str, str]:
        """Inputs that must fit into this machine's memory even if the caller allocates them, and the fields to blame.

        For other inputs, the caller's array may repeat elements.
        """
        return {}

    @abstractmethod
    def reference(self, problem: Any, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The results of ``problem`` by name, in float64, computed straight from the definition.

        Args:
            problem: the problem to compute.
            inputs: the tensors of a run by name. They are not modified: an updated tensor is returned as a new one.
        """

    @abstractmethod
    def tolerances(
        self, problem: Any, inputs: Mapping[str, NDArray[Any]], arithmetic: Arithmetic = FLOAT32
    ) -> dict[str, Tolerance]:
        """How far each result of a correct kernel may differ from :meth:`reference`, by the result's name.

        Args:
            problem: the problem that was computed.
            inputs: as for the reference.
            arithmetic: how the kernels round on the way to their results.
        """

    def arithmetic(self, kernel: Kernel) -> Arithmetic:
        """How it rounds on the way to its results, where not all kernels of its arch do so; float32, by default."""
        return FLOAT32

    def foreign_problem(self, form: str, table: str, fields: Mapping[str, Any]) -> Problem | None:
        """The problem that another project's table describes; None, as by default, if it cannot be stated here.

        Args:
            form: format of the table, such as ``aiter-csv``.
            table: name of the table in its format, such as ``a8w8``.
            fields: the fields that state the problem there, texts and integers.
        """
        return None

    def foreign_fields(self, form: str, table: str, problem: Any) -> Mapping[str, str] | None:
        """The fields that state ``problem`` in another project's table, the inverse of :meth:`foreign_problem`.

        None, as by default, if that table cannot state it.
        """
        return None

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """Other projects' implementations of its problems that it knows how to call, installed or not: none by default.

        Other distributions add some by entry points, see :mod:`catalog.foreign.installed`.
        """
        return ()

    def circumstances(self, problem: Any) -> Mapping[str, Any]:
        """What decides which implementation is the fastest, by column: by default the element type.

        Problems with equal values are one line of the list of winners in a report.
        """
        return {"dtype": str(problem.dtype)}

    @abstractmethod
    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Fields of small problems that kernels of ``family``, one of :attr:`main_families`, may answer.

        The first problem that a kernel answers shows whether the family works; invalid problems are skipped.

        Args:
            family: family of the main stage.
            traits: the :attr:`smoke_traits` of a kernel.
        """

    def problems_of_model(self, config: Mapping[str, Any], deployment: Deployment) -> Iterable[Problem]:
        """The problems of one rank of a model: what kernels must be built for. By default none.

        Args:
            config: the model's configuration, as Hugging Face's libraries write it.
            deployment: how the model is deployed.

        Raises:
            UsageError: a field of ``config`` is missing or wrong, or the ranks cannot share the model.
        """
        return ()

    def label(self, problem: Any) -> str:
        """A word or two that distinguish problems in a report: by default the element type."""
        return str(problem.dtype)

    @property
    def short_traits(self) -> tuple[str, ...]:
        """The traits used in :meth:`short_name`: by default the algorithm's."""
        return tuple(trait.name for trait in self.traits.values() if trait.group == "algorithm")

    def short_name(self, traits: Mapping[str, Any]) -> str:
        """A few words that distinguish kernels of one signature: by default the traits not at their defaults."""
        stated = {name: value for name, value in traits.items() if value != self.traits[name].default}
        return " ".join(value if isinstance(value, str) else f"{name}{value}" for name, value in stated.items())

    def lengths(self, problem: Any) -> Iterator[tuple[str, int]]:
        """The groups of problems that differ only in one size, with that size: each group is a line in a report's plot.

        By default there is one group for each size of a problem.
        """
        for size in problem.sizes:
            others = {name: value for name, value in problem.key_fields(without=(size,)).items() if name != "operation"}
            words = (f"{name}{value}" for name, value in others.items())
            yield "-".join([self.name, *words, f"{size}*"]), getattr(problem, size)
