"""A plan: the kernels that answer a problem, stage by stage, built when first run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from catalog.errors import (
    BuildError,
    CacheError,
    ChangedLibraryError,
    MissingKernelError,
    QuarantinedError,
    SelectionError,
)
from catalog.ops import operation_of
from catalog.runtime import tracing
from catalog.runtime.devices.known_call import IN_ORDER
from catalog.runtime.splits import agreed_workspace, wanted_splits
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.workspace import NO_WORKSPACE, Workspace

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.ops.implementation import Implementation
    from catalog.registry.foreign import Rival
    from catalog.runtime.bound import BoundPlan
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.fast_path import FastPath
    from catalog.runtime.devices.known_call import KnownCall, Order
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.select import Choice
    from catalog.schema.policy import Policy
    from catalog.schema.problem_form import Form

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run.

    ``outputs`` holds arrays by the operation's names: ``o``, ``lse``, ``dq``, ... An input that is updated in place is
    the caller's own array, also in a GPU's memory. ``time_ms`` is the time of a launch of all stages in milliseconds,
    the median if there were several: wall time on the host, GPU time without copies on a GPU. ``tflops`` is
    :attr:`Problem.flops` over that time. ``kernels`` holds the names of the kernels that ran; ``compile_seconds`` is
    the time spent compiling them, 0 if all were in the cache. ``arithmetic``: how they round, where not all kernels of
    their arch do so.
    """

    outputs: Mapping[str, Any] = field(repr=False)
    time_ms: float
    tflops: float
    kernels: tuple[str, ...]
    compile_seconds: float
    arithmetic: Arithmetic = FLOAT32


_MOST_PATHS = 4096
"""Maximum number of cached fast paths; when it is exceeded, all are dropped."""

_CALLS_UNTIL_KNOWN = 5
"""Fast calls of a plan, of which the last is kept as a known one: plans of lengths that vary are called less often."""
_MOST_KNOWN = 1024
"""Maximum number of known calls; when it is exceeded, all are dropped."""
_MOST_MISSES = 64
"""Calls unlike the known one after which another one is kept instead."""

_Place = tuple["Form", tuple[str, ...], "Device[Any]", tuple[str, ...]]
"""The key of a fast path: the form of problems, the ids of kernels, the device, and the names of tensors."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the plans of one catalog and arch share: loaded kernels by id, fast paths of calls, and plans' known calls.

    A loaded kernel is not built, checked or guarded again.
    """

    loaded: dict[str, LoadedKernel] = field(default_factory=dict)
    paths: dict[_Place, FastPath] = field(default_factory=dict)
    known: dict[tuple[Plan, Order], KnownCall] = field(default_factory=dict)

    def drop(self, kernel_ids: Collection[str]) -> None:
        """Forget these kernels: the next run builds, guards and loads them again."""
        for kernel_id in kernel_ids:
            self.loaded.pop(kernel_id, None)
        for place in list(self.paths):  # a copy: other threads may add paths meanwhile
            if not set(place[1]).isdisjoint(kernel_ids):
                self.paths.pop(place, None)
        self.known.clear()

    def clear(self) -> None:
        """Forget all kernels."""
        self.loaded.clear()
        self.paths.clear()
        self.known.clear()


class Services(Protocol):
    """What a plan needs from its catalog."""

    @property
    def shared(self) -> Shared:
        """The state shared by the plans of one catalog and lineage."""

    @property
    def policy(self) -> Policy:
        """The measuring policy whose timings selection used."""

    def choice(self, problem: Problem, limit: int) -> Choice:
        """The evidence that selection uses for a problem now, and the best ``limit`` candidates."""

    def build(self, kernel: Kernel) -> Artifact:
        """Return the library of a kernel, compiled unless it is in the cache."""

    def reselect(self, problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
        """Select a problem's kernels, stage by stage, except the ids ``without``."""

    def device(self, arch: str) -> Device[Any]:
        """The device that runs kernels of an arch."""

    def guard(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """Return when the libraries of a problem's kernels may be loaded; see :class:`catalog.runtime.guard.Guard`."""


_reported: set[str] = set()
"""Ids of replaced kernels for which a warning was already logged."""


@dataclass(frozen=True, slots=True)
class Instead:
    """Another project's implementation that is faster than the kernels of a plan, and its timing."""

    implementation: Implementation
    rival: Rival


class Plan:
    """The kernels that answer one problem on one arch, in the order in which they run.

    :meth:`catalog.Catalog.select` returns a plan. It compiles its kernels when it first runs, keeps them loaded, and
    can run any number of times.

    Attributes:
        problem: the problem.
        arch: the arch.
        kernels: the kernels.
        services: what it needs from its catalog.
        instead: another project's implementation that was measured as faster, if the settings allow such answers; the
            plan never calls it.
    """

    __slots__ = ("__weakref__", "_agreed", "_calls", "_loaded", "arch", "instead", "kernels", "problem", "services")

    def __init__(
        self,
        problem: Problem,
        arch: str,
        kernels: tuple[Kernel, ...],
        services: Services,
        instead: Instead | None = None,
    ) -> None:
        self.instead = instead
        self.problem = problem
        self.arch = arch
        self.kernels = kernels
        self.services = services
        self._agreed: tuple[int, Workspace] | None = None  # a number of threads, and the workspace for it
        self._loaded: tuple[LoadedKernel, ...] = ()
        self._calls = 0

    def __repr__(self) -> str:
        return f"Plan({self.arch}: {' -> '.join(kernel.name for kernel in self.kernels)})"

    def explain(self, limit: int = 10) -> Choice:
        """The evidence for the choice of the main stage, and the best ``limit`` candidates with their medians.

        Raises:
            SelectionError: no kernel answers the problem any more.
            RegistryError: the catalog cannot be read.
        """
        return self.services.choice(self.problem, limit)

    def build(self) -> tuple[Artifact, ...]:
        """Compile the kernels that are not in the cache; one that does not compile is replaced by the next applicable.

        Raises:
            BuildError: no applicable kernel compiles; this is the last one's error.
            MissingKernelError: compiling is disabled and the cache has no applicable kernel; this is the best one's
                error.
            ToolchainError: there is no usable compiler.
        """
        return self._ready(None)

    def _ready(self, device: Device[Any] | None) -> tuple[Artifact, ...]:
        """Build the kernels, guard them if there is a ``device`` to load them on, and return their libraries.

        A kernel that does not build or fails its first run is replaced. The other stages depend on the main kernel and
        may change with it, so each attempt starts over with the first stage. The loop ends because a failed kernel
        stays ``unfit`` for all later attempts, and because a missing kernel raises once selection offers no other.
        """
        unfit: set[str] = set()
        while True:
            artifacts: list[Artifact] = []
            try:
                for kernel in self.kernels:
                    artifacts.append(self.services.build(kernel))
                if device is not None:
                    self.services.guard(self.problem, self.kernels, tuple(artifacts), device)
                return tuple(artifacts)
            except MissingKernelError:
                # The cache may have changed since selection looked: it now prefers what the cache has.
                others = self.services.reselect(self.problem, unfit)
                if others == self.kernels:
                    raise
                self.kernels = others
            except CacheError:
                raise  # the folder is at fault: no other kernel could be built either
            except BuildError as error:
                self._replace(unfit, self.kernels[len(artifacts)].id, error)  # the first stage without a library
            except QuarantinedError as error:
                self._replace(unfit, error.kernel_id, error)

    def _replace(self, unfit: set[str], kernel_id: str, error: BuildError | QuarantinedError) -> None:
        """Replace the kernel that ``error`` is about; raise ``error`` if there is no other."""
        unfit.add(kernel_id)
        try:
            others = self.services.reselect(self.problem, unfit)
        except SelectionError:
            raise error from None
        if any(kernel.id in unfit for kernel in others):  # pinned kernels cannot be replaced
            raise error
        if kernel_id not in _reported:
            _reported.add(kernel_id)
            instead = ", ".join(kernel.name for kernel in others if kernel not in self.kernels)
            _log.warning("%s; using %s instead", error.message, instead)
        self.kernels = others

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *, seed: int = 0, repeats: int = 1, **tensors: Any
    ) -> Result:
        """Run the plan on tensors, ``run(q=q, k=k, v=v)`` or ``run(inputs)``; without any, on seeded random ones.

        A plan for the host takes NumPy arrays, PyTorch CPU tensors, and objects with ``__dlpack__`` on the CPU, and
        uses all in place. A plan for a GPU runs on the first GPU of its arch that the process may use, or on the GPU of
        that arch that holds the PyTorch tensors. It copies NumPy arrays to the GPU and back, and uses arrays in that
        GPU's memory (objects with ``__dlpack__`` or ``__cuda_array_interface__``, such as PyTorch tensors) in place,
        without checking lengths and page numbers. If an input is a PyTorch tensor on the device, the outputs are too,
        otherwise they are NumPy arrays; :meth:`bind` accepts other outputs. A run waits for the GPU, :meth:`enqueue`
        does not.

        Args:
            inputs: the inputs by name, with the shapes and dtypes of :attr:`Problem.tensors`.
            seed: seed of the random inputs.
            repeats: number of launches; the outputs are the last one's, the time is the median.
            tensors: the inputs as keywords.

        Raises:
            TensorError: a tensor is missing, unexpected, in other memory, or has the wrong shape, dtype or strides.
            DeviceError: this machine has no device for the arch, or a launch failed.
            QuarantinedError: every applicable kernel crashes, hangs or is wrong; this is the last one's error.
            BuildError, ToolchainError: as :meth:`build`.
        """
        bound, compile_seconds = self._bind({**(inputs or {}), **tensors}, None, seed)
        time_ms = median(bound.run(max(1, repeats))) / 1e6
        return Result(
            bound.outputs,
            time_ms,
            self.problem.flops / time_ms / 1e9,
            tuple(kernel.name for kernel in self.kernels),
            compile_seconds,
            self.arithmetic,
        )

    def bind(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        outputs: Mapping[str, Any] | None = None,
        seed: int = 0,
        **tensors: Any,
    ) -> BoundPlan:
        """Bind the plan to tensors, ``bind(q=q, k=k, v=v)``, so that launches neither check nor allocate.

        Args:
            inputs: the inputs as for :meth:`run`; without any, seeded random ones are made.
            outputs: arrays to write into, by the names of :attr:`Problem.tensors`; for a GPU they may be in its memory.
                Without any, new ones are made as in :meth:`run`. Elements that a run does not write (rows beyond the
                length of a sequence, skipped sequences) keep their values.
            seed: seed of the random inputs.
            tensors: the inputs as keywords.

        Raises:
            TensorError: as :meth:`run`, or an output is missing, unexpected, read-only, of the wrong shape, dtype or
                strides, or shares memory with another tensor.
            DeviceError, BuildError, ToolchainError: as :meth:`run`.
        """
        return self._bind({**(inputs or {}), **tensors}, outputs, seed)[0]

    def enqueue(
        self, inputs: Mapping[str, Any] | None = None, /, *, outputs: Mapping[str, Any] | None = None, **tensors: Any
    ) -> Mapping[str, Any]:
        """Queue the plan on the caller's current stream, ``enqueue(q=q, k=k, v=v)``, and return the future results.

        For tensors in a GPU's memory: nothing is copied, and once the kernels are loaded nothing waits. The current
        stream is PyTorch's if the process uses PyTorch (``with torch.cuda.stream(...)`` chooses it), else CuPy's, else
        the default stream. For repeated calls on the same tensors :meth:`bind` costs less. On the host the plan runs
        before the call returns.

        Args:
            inputs: the inputs as for :meth:`run`, arrays in one GPU's memory.
            outputs: the outputs as for :meth:`bind`; without any, PyTorch tensors are made if an input is one.
            tensors: the inputs as keywords.

        Raises:
            TensorError: as :meth:`bind`, or a tensor is a NumPy array and the plan is for a GPU.
            DeviceError, BuildError, ToolchainError: as :meth:`bind`.
        """
        given = {**(inputs or {}), **tensors} if tensors or inputs is None else inputs
        if outputs is None:
            made = self.known(given)
            if made is None:
                made = self.again(given)
            if made is not None:
                return made
        from catalog.runtime.bound import enqueue, take

        device = self.services.device(self.arch).beside(given)
        taken = take(self.problem, device, given, outputs, 0)
        self._load(device)
        args = enqueue(self, device, self._loaded, taken)
        paths = self.services.shared.paths
        place, means = self._place(device, given), device.means(self.problem.form, given)
        if place not in paths and means is not None:
            from catalog.runtime.devices.fast_path import FastPath

            if len(paths) >= _MOST_PATHS:
                paths.clear()
            paths[place] = FastPath(self._loaded, self.problem.form, given, args, means)
        return taken.results

    @property
    def arithmetic(self) -> Arithmetic:
        """How the kernels round, where not all kernels of their arch do so."""
        return reduce(or_, map(operation_of(self.problem).arithmetic, self.kernels))

    def again(
        self, given: Mapping[str, Any], *, differentiated: bool = False, order: Order = IN_ORDER
    ) -> Mapping[str, Any] | None:
        """As :meth:`enqueue`, where an earlier call was checked whose tensors had these names and types; else None.

        None as well for tensors that kernels cannot take as they are: :meth:`enqueue` converts or refuses them. Those
        that require gradients are taken if they are ``differentiated`` by the caller. After some such calls
        :meth:`known` takes tensors like these in the ``order``.

        Raises:
            DeviceError: as :meth:`enqueue`.
        """
        if tracing.active:
            return None
        device = self.services.device(self.arch).beside(given)
        path = self.services.shared.paths.get(self._place(device, given))
        if path is None:
            return None
        self._calls += 1
        workspace_of = partial(self.workspace, device, path.kernels)
        if self._calls < _CALLS_UNTIL_KNOWN or (self, order) in self.services.shared.known:
            return path(self.problem, given, workspace_of, differentiated)
        keep = partial(self._keep, order)
        return path(self.problem, given, workspace_of, differentiated, order=order, keep=keep)

    def known(
        self, given: Mapping[str, Any], *, differentiated: bool = False, order: Order = IN_ORDER
    ) -> Mapping[str, Any] | None:
        """As :meth:`again`, where an earlier call's tensors had these names, types, sizes and strides; else None.

        Tensors and results are in the ``order``.

        Raises:
            DeviceError: as :meth:`enqueue`.
        """
        call = self.services.shared.known.get((self, order)) if self._calls >= _CALLS_UNTIL_KNOWN else None
        if call is None or tracing.active:
            return None
        made = call(given, differentiated)
        if made is None:
            call.misses += 1
            if call.misses >= _MOST_MISSES:
                self.services.shared.known.pop((self, order), None)
        return made

    def compiled(self, order: Order) -> Any:
        """The call of :mod:`catalog.torch.native` that repeats what :meth:`known` does; None if there is none."""
        call = self.services.shared.known.get((self, order))
        return None if call is None else call.repeated

    def _keep(self, order: Order, call: KnownCall) -> None:
        known = self.services.shared.known
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[self, order] = call

    def _place(self, device: Device[Any], given: Mapping[str, Any]) -> _Place:
        return self.problem.form, tuple([kernel.id for kernel in self.kernels]), device, tuple(given)

    def workspace(self, device: Device[Any], kernels: tuple[LoadedKernel, ...], args: Any = None) -> Workspace:
        """The workspace that the stages share on a device; the loaded kernels are asked for it once.

        ``args`` as of :func:`~catalog.runtime.splits.agreed_workspace`.

        Raises:
            DeviceError: the workspace would be larger than any memory.
        """
        if not self.problem.form.divided:
            return NO_WORKSPACE
        threads, agreed = device.threads, self._agreed
        if agreed is None or agreed[0] != threads:
            wanted = wanted_splits(self.problem, self.kernels, threads)
            agreed = self._agreed = threads, agreed_workspace(self.problem, kernels, wanted, args)
        return agreed[1]

    def _find_loaded(self) -> bool:
        """Whether this plan or another has loaded the kernels."""
        if not self._loaded:
            there = self.services.shared.loaded
            loaded = [there[kernel.id] for kernel in self.kernels if kernel.id in there]
            if len(loaded) < len(self.kernels):
                return False
            self._loaded = tuple(loaded)
        return True

    def _bind(self, given: Mapping[str, Any], outputs: Mapping[str, Any] | None, seed: int) -> tuple[BoundPlan, float]:
        """Bind the tensors; return the bound plan and the seconds spent compiling."""
        from catalog.runtime.bound import bind, take

        device = self.services.device(self.arch).beside(given)
        taken = take(self.problem, device, given, outputs, seed)  # bad tensors fail before anything is compiled
        compile_seconds = self._load(device)
        return bind(self, device, self._loaded, taken), compile_seconds

    def _load(self, device: Device[Any]) -> float:
        """Load the kernels unless they are loaded; return the seconds spent compiling."""
        if self._find_loaded():
            return 0.0
        tracing.follow_settings()
        artifacts = self._ready(device)
        try:
            self._loaded = _load(device, artifacts)
        except ChangedLibraryError as error:  # damaged, or dropped by another process since the build
            _log.warning("%s: building again", error.message)
            artifacts = self._ready(device)
            self._loaded = _load(device, artifacts)
        self.services.shared.loaded.update({kernel.id: kernel for kernel in self._loaded})
        return sum(artifact.compile_seconds for artifact in artifacts if not artifact.cached)


def _load(device: Device[Any], artifacts: tuple[Artifact, ...]) -> tuple[LoadedKernel, ...]:
    return tuple(device.load(artifact.path, artifact.sha256, artifact.kernel_id) for artifact in artifacts)
