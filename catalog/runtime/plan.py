"""A plan: the stages that answer a problem, built when first run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from catalog.errors import BuildError, DeviceError, SelectionError
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.runtime.bound import BoundPlan
    from catalog.runtime.devices.host import HostDevice
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.tensors import Array

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gave.

    ``outputs`` are arrays by name: ``o``, ``lse``, ``dq``, ... as the operation has them. An updated input is the very
    array that was given. ``time_ms`` is the wall time of the launches of all stages, the median where there were
    several; ``tflops`` counts :attr:`Problem.flops`. ``kernels`` are the names of the
    kernels that ran, ``compile_seconds`` what compiling them took, 0 for what the cache had.
    """

    outputs: Mapping[str, Array] = field(repr=False)
    time_ms: float
    tflops: float
    kernels: tuple[str, ...]
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class Services:
    """What a plan needs of its catalog: build a kernel, find another when one does not compile, the host's device."""

    build: Callable[[Kernel], Artifact]
    reselect: Callable[[], tuple[Kernel, ...]]
    host: Callable[[], HostDevice]


class Plan:
    """The kernels that answer one problem on one arch, in the order in which they run.

    A plan is made by :meth:`catalog.Catalog.select`; it compiles its kernels when it first runs, keeps them loaded, and
    may run any number of times.
    """

    def __init__(self, problem: Problem, arch: str, kernels: tuple[Kernel, ...], services: Services) -> None:
        self.problem = problem
        self.arch = arch
        self.kernels = kernels
        self._services = services
        self._loaded: tuple[LoadedKernel, ...] = ()

    def __repr__(self) -> str:
        return f"Plan({self.arch}: {' -> '.join(kernel.name for kernel in self.kernels)})"

    def build(self) -> tuple[Artifact, ...]:
        """Compile the kernels that the cache has not; a kernel that does not compile gives way to the next applicable.

        Raises:
            BuildError: no applicable kernel compiles; the last one's error.
            ToolchainError: there is no usable compiler.
        """
        tried: set[str] = set()
        while True:
            try:
                return tuple(self._services.build(kernel) for kernel in self.kernels)
            except BuildError as error:
                tried.update(kernel.id for kernel in self.kernels)
                try:
                    others = self._services.reselect()
                except SelectionError:
                    raise error from None
                if any(kernel.id in tried for kernel in others):
                    raise
                _log.warning("%s; taking %s instead", error.message, others[0].name)
                self.kernels = others

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *, seed: int = 0, repeats: int = 1, **tensors: Any
    ) -> Result:
        """Run the plan on tensors, ``run(q=q, k=k, v=v)`` or ``run(inputs)``; without any, on seeded random ones.

        Args:
            inputs: the inputs by name, NumPy arrays as :attr:`Problem.tensors` describes them.
            seed: of the random inputs.
            repeats: launches; the outputs are the last one's, the time is the median.
            tensors: the inputs as keywords.

        Raises:
            TensorError: a tensor is missing, superfluous, or of the wrong shape, dtype or strides.
            DeviceError: this machine has no device for the arch, or a launch failed.
            BuildError, ToolchainError: as :meth:`build`.
        """
        bound, compile_seconds = self._bind({**(inputs or {}), **tensors}, None, seed)
        time_ms = median(bound.time(max(1, repeats))) / 1e6
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
            outputs: arrays to write into, by the names of :attr:`Problem.tensors`; without any, new ones are made.
                What a run leaves alone (rows behind the real length of a sequence, skipped sequences) keeps its value
                in a given array.
            seed: of the random inputs.
            tensors: the inputs as keywords.

        Raises:
            TensorError, DeviceError, BuildError, ToolchainError: as :meth:`run`; TensorError also where an output is
                missing, superfluous, of the wrong shape, dtype or strides, read-only, or shares memory with another
                tensor.
        """
        return self._bind({**(inputs or {}), **tensors}, outputs, seed)[0]

    def _bind(self, given: Mapping[str, Any], outputs: Mapping[str, Any] | None, seed: int) -> tuple[BoundPlan, float]:
        """The bound plan, and the seconds that compiling it took."""
        from catalog.runtime.bound import bind, take

        self._check_device()
        tensors = take(self.problem, given, outputs, seed)  # before anything is compiled for them
        device = self._services.host()
        compile_seconds = self._load(device)
        return bind(self, device, self._loaded, tensors), compile_seconds

    def _load(self, device: HostDevice) -> float:
        """Load the kernels, unless they are; the seconds that compiling took."""
        if self._loaded:
            return 0.0
        artifacts = self.build()
        self._loaded = tuple(device.load(artifact.path, artifact.sha256, artifact.kernel_id) for artifact in artifacts)
        return sum(artifact.compile_seconds for artifact in artifacts if not artifact.cached)

    def _check_device(self) -> None:
        if self._loaded:
            return
        from catalog.runtime.devices import why_unavailable

        reason = why_unavailable(self.arch)
        if reason is not None:
            raise DeviceError(
                f"{self.arch} kernels cannot run on this machine: {reason}.",
                hint="Select with arch='host' to run on this machine's CPU.",
            )
