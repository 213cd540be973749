"""A plan: the stages that answer a problem, built when first run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
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
from catalog.runtime import tracing
from catalog.runtime.splits import wanted_splits
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.workspace import NO_WORKSPACE, Workspace

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.runtime.bound import BoundPlan
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.fast_path import FastPath
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.select import Choice
    from catalog.schema.problem_form import Form

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gave.

    ``outputs`` are arrays by name: ``o``, ``lse``, ``dq``, ... as the operation has them. An updated input is the very
    array that was given, also in a GPU's memory. ``time_ms`` is the time of a launch of all stages, the median where
    there were several: wall time on the host, on a GPU by its own clock and without copies; ``tflops`` counts
    :attr:`Problem.flops`. ``kernels`` are the names of the kernels that ran, ``compile_seconds`` what compiling them
    took, 0 for what the cache had.
    """

    outputs: Mapping[str, Any] = field(repr=False)
    time_ms: float
    tflops: float
    kernels: tuple[str, ...]
    compile_seconds: float


_MOST_PATHS = 4096
"""Fast paths that are remembered; beyond that all are forgotten."""

_Place = tuple["Form", tuple[str, ...], "Device[Any]", tuple[str, ...]]
"""What a fast path is for: the form of problems, the ids of kernels, the device, and the names of tensors."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What plans of one catalog and arch share: kernels that are loaded, by id, and the fast paths of their calls.

    A kernel that is loaded is not built, checked or guarded again.
    """

    loaded: dict[str, LoadedKernel] = field(default_factory=dict)
    paths: dict[_Place, FastPath] = field(default_factory=dict)

    def drop(self, kernel_ids: Collection[str]) -> None:
        """Settle these kernels anew from now on."""
        for kernel_id in kernel_ids:
            self.loaded.pop(kernel_id, None)
        for place in list(self.paths):  # other threads add to it
            if not set(place[1]).isdisjoint(kernel_ids):
                self.paths.pop(place, None)

    def clear(self) -> None:
        """Settle every kernel anew from now on."""
        self.loaded.clear()
        self.paths.clear()


class Services(Protocol):
    """What a plan asks of its catalog."""

    @property
    def shared(self) -> Shared:
        """What plans of one catalog and lineage share."""

    def choice(self, problem: Problem, limit: int) -> Choice:
        """What selection uses to choose for a problem now, and the best ``limit`` candidates."""

    def build(self, kernel: Kernel) -> Artifact:
        """The library of a kernel, compiled unless the cache has it."""

    def reselect(self, problem: Problem, without: Set[str]) -> tuple[Kernel, ...]:
        """A problem's kernels, stage by stage, except the ids ``without``."""

    def device(self, arch: str) -> Device[Any]:
        """What kernels of an arch run on."""

    def guard(
        self, problem: Problem, kernels: Sequence[Kernel], artifacts: Sequence[Artifact], device: Device[Any]
    ) -> None:
        """Return when the libraries of a problem's kernels may be loaded; see :class:`catalog.runtime.guard.Guard`."""


_reported: set[str] = set()
"""Ids of the kernels that a warning was about, because others took their place."""


class Plan:
    """The kernels that answer one problem on one arch, in the order in which they run.

    A plan is made by :meth:`catalog.Catalog.select`; it compiles its kernels when it first runs, keeps them loaded, and
    may run any number of times.
    """

    def __init__(self, problem: Problem, arch: str, kernels: tuple[Kernel, ...], services: Services) -> None:
        self.problem = problem
        self.arch = arch
        self.kernels = kernels
        self.services = services
        self._workspaces: dict[int, Workspace] = {}  # by the threads of the device
        self._loaded: tuple[LoadedKernel, ...] = ()

    def __repr__(self) -> str:
        return f"Plan({self.arch}: {' -> '.join(kernel.name for kernel in self.kernels)})"

    def explain(self, limit: int = 10) -> Choice:
        """What the choice of the main stage goes by now, and the best ``limit`` candidates with their medians.

        Raises:
            SelectionError, RegistryError: no kernel answers the problem any more, or the catalog cannot be read.
        """
        return self.services.choice(self.problem, limit)

    def build(self) -> tuple[Artifact, ...]:
        """Compile the kernels that the cache has not; a kernel that does not compile gives way to the next applicable.

        Raises:
            BuildError: no applicable kernel compiles; the last one's error.
            MissingKernelError: compiling is forbidden, and the cache has no applicable kernel; the best one's error.
            ToolchainError: there is no usable compiler.
        """
        return self._ready(None)

    def _ready(self, device: Device[Any] | None) -> tuple[Artifact, ...]:
        """The libraries of the kernels, fit to be loaded where there is a ``device`` to load them.

        A kernel that cannot be had gives way, and with it the other stages may be others: which there are depends on
        the main kernel. So each round begins with the first stage. Rounds come to an end because a kernel is ``unfit``
        for all later ones, and because a missing one raises as soon as selection has no other choice.
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
                others = self.services.reselect(self.problem, unfit)  # which prefers what the cache has now
                if others == self.kernels:
                    raise
                self.kernels = others
            except CacheError:
                raise  # no other kernel would fare better
            except BuildError as error:
                self._replace(unfit, self.kernels[len(artifacts)].id, error)  # the stage after those that were built
            except QuarantinedError as error:
                self._replace(unfit, error.kernel_id, error)

    def _replace(self, unfit: set[str], kernel_id: str, error: BuildError | QuarantinedError) -> None:
        """Go on without the kernel that ``error`` is about; raises it where there is no other."""
        unfit.add(kernel_id)
        try:
            others = self.services.reselect(self.problem, unfit)
        except SelectionError:
            raise error from None
        if any(kernel.id in unfit for kernel in others):  # given kernels, which give way to no other
            raise error
        if kernel_id not in _reported:
            _reported.add(kernel_id)
            instead = ", ".join(kernel.name for kernel in others if kernel not in self.kernels)
            _log.warning("%s; taking %s instead", error.message, instead)
        self.kernels = others

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *, seed: int = 0, repeats: int = 1, **tensors: Any
    ) -> Result:
        """Run the plan on tensors, ``run(q=q, k=k, v=v)`` or ``run(inputs)``; without any, on seeded random ones.

        A plan of the host takes NumPy arrays, CPU tensors of PyTorch, and what has ``__dlpack__`` on the CPU, all on
        their own memory. A plan of a GPU's arch runs on the first GPU of that arch that the process may use, or on the
        one of that arch that PyTorch's tensors are on. It takes NumPy arrays, which are copied there and back, and
        arrays in that GPU's memory (``__dlpack__`` or ``__cuda_array_interface__``, PyTorch's for one), which are used
        where they are and whose lengths and page numbers are not checked. Outputs are tensors of PyTorch's on the
        device where an input is one, else NumPy arrays; :meth:`bind` takes others. A run waits for the GPU,
        :meth:`enqueue` does not.

        Args:
            inputs: the inputs by name, arrays as :attr:`Problem.tensors` describes them.
            seed: of the random inputs.
            repeats: launches; the outputs are the last one's, the time is the median.
            tensors: the inputs as keywords.

        Raises:
            TensorError: a tensor is missing, superfluous, of the wrong shape, dtype or strides, or in other memory.
            DeviceError: this machine has no device for the arch, or a launch failed.
            QuarantinedError: no applicable kernel is left that does not end its process or hang; the last one's error.
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
        """Fix the tensors, ``bind(q=q, k=k, v=v)``, so that launches neither check nor allocate.

        Args:
            inputs: as :meth:`run` takes them; without any, seeded random ones are made.
            outputs: arrays to write into, by the names of :attr:`Problem.tensors`, for a GPU also arrays in its memory;
                without any, new ones are made, as of :meth:`run`. What a run leaves alone (rows behind the real length
                of a sequence, skipped sequences) keeps its value in a given array.
            seed: of the random inputs.
            tensors: the inputs as keywords.

        Raises:
            TensorError, DeviceError, BuildError, ToolchainError: as :meth:`run`; TensorError also where an output is
                missing, superfluous, of the wrong shape, dtype or strides, read-only, or shares memory with another
                tensor.
        """
        return self._bind({**(inputs or {}), **tensors}, outputs, seed)[0]

    def enqueue(
        self, inputs: Mapping[str, Any] | None = None, /, *, outputs: Mapping[str, Any] | None = None, **tensors: Any
    ) -> Mapping[str, Any]:
        """Queue the plan on the caller's current stream, ``enqueue(q=q, k=k, v=v)``; the results, as they will be.

        For tensors in a GPU's memory: nothing is copied, and nothing is waited for once the kernels are loaded. The
        current stream is PyTorch's where the process uses it (``with torch.cuda.stream(...)`` chooses), else CuPy's,
        else the default one. :meth:`bind` costs less where the same tensors come again. The host runs the plan.

        Args:
            inputs: as :meth:`run` takes them, arrays in one GPU's memory.
            outputs: as :meth:`bind` takes them; without any, tensors of PyTorch's are made where an input is one.
            tensors: the inputs as keywords.

        Raises:
            TensorError, DeviceError, BuildError, ToolchainError: as :meth:`bind`; TensorError also where a tensor is a
                NumPy array, and the plan is of a GPU's arch.
        """
        given = {**(inputs or {}), **tensors}
        device = self.services.device(self.arch).beside(given)
        paths = self.services.shared.paths
        path = None if outputs is not None or tracing.active else paths.get(self._place(device, given))
        if path is not None:
            made = path(self.problem, given, self.workspace(device, path.kernels))
            if made is not None:
                return made
        from catalog.runtime.bound import enqueue, take

        taken = take(self.problem, device, given, outputs, 0)
        self._load(device)
        args = enqueue(self, device, self._loaded, taken)
        place, means = self._place(device, given), device.means(self.problem.form, given)
        if place not in paths and means is not None:
            from catalog.runtime.devices.fast_path import FastPath

            if len(paths) >= _MOST_PATHS:
                paths.clear()
            paths[place] = FastPath(self._loaded, self.problem.form, given, args, means)
        return taken.results

    def _place(self, device: Device[Any], given: Mapping[str, Any]) -> _Place:
        return self.problem.form, tuple([kernel.id for kernel in self.kernels]), device, tuple(given)

    def workspace(self, device: Device[Any], kernels: tuple[LoadedKernel, ...]) -> Workspace:
        """What the stages share on a device; the loaded kernels are asked once.

        Raises:
            DeviceError: it would be larger than any memory.
        """
        if not self.problem.divided:
            return NO_WORKSPACE
        threads = device.threads
        workspace = self._workspaces.get(threads)
        if workspace is None:
            from catalog.runtime.bound import agreed_workspace

            wanted = wanted_splits(self.problem, self.kernels, threads)
            workspace = self._workspaces[threads] = agreed_workspace(self.problem, kernels, wanted)
        return workspace

    def _find_loaded(self) -> bool:
        """Whether the kernels are loaded, by this plan or another."""
        if not self._loaded:
            there = self.services.shared.loaded
            loaded = [there[kernel.id] for kernel in self.kernels if kernel.id in there]
            if len(loaded) < len(self.kernels):
                return False
            self._loaded = tuple(loaded)
        return True

    def _bind(self, given: Mapping[str, Any], outputs: Mapping[str, Any] | None, seed: int) -> tuple[BoundPlan, float]:
        """The bound plan, and the seconds that compiling it took."""
        from catalog.runtime.bound import bind, take

        device = self.services.device(self.arch).beside(given)
        taken = take(self.problem, device, given, outputs, seed)  # before anything is compiled for them
        compile_seconds = self._load(device)
        return bind(self, device, self._loaded, taken), compile_seconds

    def _load(self, device: Device[Any]) -> float:
        """Load the kernels, unless they are; the seconds that compiling took."""
        if self._find_loaded():
            return 0.0
        tracing.follow_settings()
        artifacts = self._ready(device)
        try:
            self._loaded = _load(device, artifacts)
        except ChangedLibraryError as error:  # dropped by another process in between, or damaged
            _log.warning("%s: building again", error.message)
            artifacts = self._ready(device)
            self._loaded = _load(device, artifacts)
        self.services.shared.loaded.update({kernel.id: kernel for kernel in self._loaded})
        return sum(artifact.compile_seconds for artifact in artifacts if not artifact.cached)


def _load(device: Device[Any], artifacts: tuple[Artifact, ...]) -> tuple[LoadedKernel, ...]:
    return tuple(device.load(artifact.path, artifact.sha256, artifact.kernel_id) for artifact in artifacts)
