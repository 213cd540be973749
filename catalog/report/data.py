"""The data of a report: what each plot shows, independent of how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catalog.report.winners import Winner
from catalog.schema.lineage import Lineage
from catalog.schema.policy import Policy


@dataclass(frozen=True, slots=True)
class Device:
    """A measured device, with the numbers of timed kernels, problems, and timings of both kinds."""

    id: int
    arch: str
    name: str
    cores: int | None
    problems: int
    kernels: int
    timings: int
    cold: int
    last: str

    @property
    def label(self) -> str:
        """Arch and product."""
        cores = "" if self.cores is None else f", {self.cores} cores"
        return f"{self.arch}: {self.name}{cores}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of kernels of a lineage that exist, are built and are timed; of a receipt, or all if it is None."""

    lineage: Lineage
    receipt: int | None
    about: str
    kernels: int
    built: int
    timed: int

    @property
    def label(self) -> str:
        """The receipt's number and what it is; None is every kernel."""
        return "every kernel" if self.receipt is None else f"{self.receipt}: {self.about}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a kernel on a problem: TFLOP/s, GB/s of the least traffic, and its median in ms.

    ``operation`` is what the problem computes, in a word or two; ``short`` distinguishes kernels of a signature.
    """

    problem: str
    operation: str
    kernel: str
    short: str
    tflops: float
    gbps: float
    median_ms: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return 1e3 * self.tflops / self.gbps


@dataclass(frozen=True, slots=True)
class Roofline:
    """The fastest kernel of each problem under the roof: the slope of ``gbps`` up to ``tflops``.

    ``peaks``: the roof is of measured peaks, otherwise of the best of all timings.
    """

    device: Device
    tflops: float
    gbps: float
    peaks: bool
    points: tuple[Speed, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Problems that differ in one length only: TFLOP/s by length, of each kernel, the fastest kernel first."""

    device: Device
    problems: str
    lines: Mapping[str, tuple[tuple[int, Speed], ...]]

    @property
    def size(self) -> int:
        """The number of points."""
        return sum(map(len, self.lines.values()))


@dataclass(frozen=True, slots=True)
class Tile:
    """The best kernels with a tile of ``m0`` by ``n0``: their speed, and how much was tried.

    ``relative`` is the best median of a problem over that of the tile, on average over problems: 1 is the fastest.
    """

    m0: int
    n0: int
    relative: float
    tflops: float
    problems: int
    kernels: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles that were tried on problems of one kind."""

    device: Device
    kind: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Selected:
    """What selection takes for a measured problem, beside the best, in TFLOP/s.

    ``static`` is the first kernel of the static order. A value is None if that kernel was not timed on this problem.
    """

    problem: str
    evidence: str
    kernel: str
    tflops: float | None
    static: float | None
    best_kernel: str
    best: float


@dataclass(frozen=True, slots=True)
class Selection:
    """:class:`Selected` for the device that selection uses, and the number of problems without a kernel now."""

    device: Device
    problems: tuple[Selected, ...]
    unanswered: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A library: the seconds that it took to compile, and the speed on the problem where it reaches most TFLOP/s."""

    family: str
    compile_s: float
    speed: Speed


@dataclass(frozen=True, slots=True)
class Compiles:
    """The libraries that were timed on a device."""

    device: Device
    libraries: tuple[Compiled, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """A problem that was selected ``count`` times on ``arch`` and never measured there."""

    arch: str
    problem: str
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """All data of a page; ``arch`` is None for all archs.

    ``left_out`` names operations with kernels in the catalog that no installed package has.
    """

    arch: str | None
    left_out: tuple[str, ...]
    devices: tuple[Device, ...]
    problems: int
    lineages: tuple[Coverage, ...]
    artifacts: Mapping[str, int]
    misses: tuple[Miss, ...]
    rooflines: tuple[Roofline, ...]
    lengths: tuple[Lengths, ...]
    tiles: tuple[Tiles, ...]
    selections: tuple[Selection, ...]
    compiles: tuple[Compiles, ...]
    winners: tuple[Winner, ...]
    policy: Policy
    coverage: tuple[Coverage, ...]
