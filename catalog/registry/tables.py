"""The tables of a catalog, described in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from catalog.ops.protocol import Operation
from catalog.registry.foreign import VIEW
from catalog.registry.views import rows_of, view_of
from catalog.schema.columns import BASE, BUILD, IDENTITY, SELECTION, TARGET, Column, columns_of


class Table(NamedTuple):
    """A table or view: the meaning of its rows and of each column."""

    about: str
    columns: Mapping[str, str]


def _words(*names: str, **own: str) -> Mapping[str, str]:
    """Meanings of columns: shared ones by name, then the table's own."""
    return MappingProxyType({name: _COMMON[name] for name in names} | own)


def _meanings(columns: Iterable[Column]) -> dict[str, str]:
    return {column.name: column.meaning + (f" ({column.domain})" if column.domain else "") for column in columns}


_COMMON = _meanings((*IDENTITY, BASE, TARGET, *SELECTION, *BUILD))
_KERNEL_ID = "id of the kernel"
_CREATED = "when, ISO 8601 in UTC"

_SIZES = {f"size_{n}": f"log2(1 + extent) of the operation's size number {n}" for n in range(1, 6)}

_FOREIGN_KERNEL = {
    "source": "project that the kernel belongs to",
    "operation": "what the kernel computes",
    "arch": "arch of the kernel",
    "name": "name of the kernel there; of several stages, joined by +",
    "traits": "what else is known about the kernel, a JSON object",
}

_FOREIGN_TIMING = {
    "key": "SHA-256 of everything that the record states, except the place in the file",
    "format": "format of the table",
    "table_name": "table of the format",
    "problem": "fields that state the problem in the table, a JSON object",
    "median_ms": "time in ms; NULL: listed without a time",
    "n": "launches; NULL: not stated",
    "tool": "program that measured, with its version; empty: not stated",
    "measured": "when it was measured; NULL: not stated",
    "fields": "all fields of the record as texts, a JSON object in the file's order",
    "file": "name of the file",
    "line": "line in the file",
    "created": "when it was recorded, ISO 8601 in UTC",
    "measured_as": "eager or graph, for times measured here; NULL: not stated",
    "cold": "1: caches were emptied before every launch; NULL: not stated",
}

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "kernel": Table(
            "Columns that all kernels have. Traits are in the table of each operation.",
            _words(
                "id",
                "name",
                "target",
                "hw_valid",
                "dispatch_order",
                key="number of the kernel in this file",
                lineage="row of table lineage",
                family="kernel family",
            ),
        ),
        "lineage": Table(
            "The enumerations that made the kernels.",
            _words(
                "arch",
                "revision",
                "space",
                id="number of the lineage in this file",
                operation="name of the operation that the kernels compute",
                variant="variant of the enumeration; attention: the mask implementation",
            ),
        ),
        "adopted": Table(
            "The lineages that a user's own checkout lists.",
            _words(
                lineage="row of table lineage",
                root="path of the checkout",
                git_commit="git commit of the checkout; empty: not under git, or its generator was edited since",
                digest="SHA-256 of the generator's files",
                base="nearest known revision: its rules, dispatch order and name grammar apply",
                receipts="receipts of the checkout, separated by spaces",
                created=_CREATED,
            ),
        ),
        "unknown_name": Table(
            "Names in the list of an adopted checkout that the name grammar of its nearest revision cannot read.",
            _words(
                "name",
                lineage="row of table lineage",
                part="first part of the name that is new",
                place="where a trait for it would go",
            ),
        ),
        "kernel_receipt": Table(
            "Which receipts, upstream's numbered product subsets, list a kernel.",
            _words(kernel_id=_KERNEL_ID, receipt="number of the receipt, described in table rule"),
        ),
        "population": Table(
            "What was populated, and from which spec.",
            _words(
                lineage="row of table lineage",
                receipts="receipts that it was restricted to, separated by spaces; empty: all",
                restriction="restriction by sweep files, an expression or a filter, in words; empty: none",
                digest="SHA-256 of the spec and of the SQL made from it",
                compute_units="compute units of the arch, a parameter of selection rules",
                kernels="how many",
                families="number of kernels in each family, a JSON object",
                seconds="duration in seconds",
                created=_CREATED,
            ),
        ),
        "rule": Table(
            "The rules that make, check and select kernels.",
            _words(
                "arch",
                "revision",
                "space",
                operation="name of the operation that the kernels compute",
                kind="variant, constraint, receipt, hardware, headers, invariant, applicability or order",
                scope="enumeration or family that it applies to; empty: all",
                id="name of the rule; for a receipt its number",
                position="place among the rules of its kind",
                expr="SQL expression over the columns of kernel",
                reason="why, in a sentence",
                source="file and function upstream",
                quirk="its oddity upstream; NULL: none",
            ),
        ),
        "artifact": Table(
            "Builds of kernels: libraries, and failures with their logs.",
            _words(
                "arch",
                *(column.name for column in BUILD),
                key="content key: SHA-256 over source, headers, compiler, flags and target",
                kernel_id=_KERNEL_ID,
                toolchain="compiler and version",
                flags="flags of the compiler",
                status="built, failed, or quarantined: its first run ended the process or hung",
                log="output of the compiler, or the reason of the quarantine",
                so_sha256="SHA-256 of the library",
                so_bytes="size of the library",
                created=_CREATED,
                elsewhere="1: the row came from a merge; the library is on another machine",
                dropped="when the library left the cache; NULL: it is there",
            ),
        ),
        "device": Table(
            "The devices that kernels were timed on.",
            _words("arch", id="number of the device", name="product", facts="cores that kernels use, a JSON object"),
        ),
        "problem": Table(
            "Concrete calls that were timed or asked for.",
            _words(
                id="number of the problem",
                key="its fields, canonical JSON",
                kind="what similar problems have in common, canonical JSON",
                operation="name of the operation that the problem asks for",
                **_SIZES,
            ),
        ),
        "timing": Table(
            "The speed of a library on a problem and device: statistics of launches, in ms.",
            _words(
                problem_id="id of the problem",
                kernel_id=_KERNEL_ID,
                device_id="id of the device",
                artifact_key="key of the library",
                measured_as="eager: time of a call with its host part; graph: time of the device alone",
                cold="1: caches were emptied before every launch",
                n="launches",
                min_ms="minimum of a launch",
                median_ms="median of undisturbed blocks of launches; selection orders kernels by it",
                p10_ms="10th percentile of the blocks",
                p90_ms="90th percentile of the blocks",
                low_ms="lower end of the median's 95 % confidence interval",
                high_ms="upper end of the same interval",
                tflops="1e12 FLOP of the matrix products per second, from the median",
                gbps="1e9 bytes of all tensors, each counted once, per second, from the median",
                load="load average of the machine",
                clock_mhz="clock of the device; NULL: not reported",
                created=_CREATED,
            ),
        ),
        "model": Table(
            "What was learned from timings about the problems of a kind: a model of the time, and how well it chooses.",
            _words(
                kind="what the problems have in common, canonical JSON, as in table problem",
                lineage="row of table lineage",
                device_id="id of the device",
                measured_as="as in table timing",
                cold="as in table timing",
                terms="names of the terms of the time, a JSON array",
                factors="ms for each unit of each term, by kernel id: a JSON object of arrays",
                candidates="number of kernels of the static order from which predictions choose",
                problems="number of measured problems",
                timings="number of timings",
                static="time of the static order's choices over that of the best, geometric mean",
                nearest="the same for the nearest problem's choices; each problem was left out of the evidence",
                predicted="the same for predictions",
                created=_CREATED,
            ),
        ),
        "miss": Table(
            "Problems that were selected for an arch without a measurement: one row for each kind and size.",
            _words(
                "arch",
                bucket="the binary logarithms of the sizes, rounded down, and the kind",
                problem_id="row of table problem: an example",
                n="how often; written each time it has doubled",
                last="when last, ISO 8601 in UTC",
            ),
        ),
        "foreign_kernel": Table(
            "Kernels of other projects, which are no rows of this catalog.",
            _FOREIGN_KERNEL
            | {
                "id": "number of the kernel in this file",
                "digest": "SHA-256 of the traits",
            },
        ),
        "foreign_timing": Table(
            "Times that other projects state for their kernels, imported from their tables.",
            _FOREIGN_TIMING
            | {
                "kernel_id": "row of table foreign_kernel",
                "device_id": "row of table device",
                "problem_id": "row of table problem; NULL: no operation that was installed can state the problem",
            },
        ),
        VIEW: Table(
            "Foreign timings with their kernels and devices.",
            _FOREIGN_KERNEL
            | _FOREIGN_TIMING
            | {
                "device": "product; empty: not stated",
                "facts": "cores: compute units of the device; a JSON object",
                "preferred": "1: the best evidence for this problem on this device: with a time, then the newest, then "
                "that of most launches, then the fastest",
                "problem_key": "key of the problem in this catalog; NULL: it cannot be stated",
            },
        ),
    }
)
"""The tables of every catalog."""


def tables_of(operation: Operation) -> Mapping[str, Table]:
    """The views and tables that queries about an operation's kernels may read; the view with everything is first."""
    meanings = _meanings(columns_of(operation))
    row = {name: meanings[name] for name in (*operation.traits.identity, *operation.traits)}
    return {
        view_of(operation.name): Table(
            f"Every kernel of {operation.name} with all that is known about it: traits, receipts, build, best timing.",
            meanings,
        ),
        operation.name: Table(
            f"The traits of every kernel of {operation.name}.",
            {"kernel": "key of the kernel", "lineage": "row of table lineage"}
            | {name: meanings[name] for name in operation.traits},
        ),
        rows_of(operation.name): Table(
            f"Every kernel of {operation.name}: the tables {operation.name}, kernel and lineage joined.",
            {"key": "number of the kernel in this file", "id": meanings["id"], "name": meanings["name"]}
            | {"lineage": "row of table lineage", "variant": meanings[operation.variant.name]}
            | row
            | {BASE.name: meanings[BASE.name]}
            | {name: meanings[name] for name in ("hw_valid", "dispatch_order")},
        ),
        **TABLES,
    }
