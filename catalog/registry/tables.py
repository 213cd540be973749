"""The tables of a catalog in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from catalog.ops.protocol import Operation
from catalog.registry.views import rows_of, view_of
from catalog.schema.columns import BUILD, IDENTITY, SELECTION, TARGET, Column, columns_of


class Table(NamedTuple):
    """A table or view: what its rows are, and what each column means."""

    about: str
    columns: Mapping[str, str]


def _words(*names: str, **own: str) -> Mapping[str, str]:
    """Meanings of columns: those of all views by name, and the table's own."""
    return MappingProxyType({name: _COMMON[name] for name in names} | own)


def _meanings(columns: Iterable[Column]) -> dict[str, str]:
    return {column.name: column.meaning + (f" ({column.domain})" if column.domain else "") for column in columns}


_COMMON = _meanings((*IDENTITY, TARGET, *SELECTION, *BUILD))
_KERNEL_ID = "id of the kernel"
_CREATED = "when, ISO 8601 in UTC"

_SIZES = {f"size_{n}": f"log2(1 + extent) of the {n}. size that its operation names" for n in range(1, 6)}

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "kernel": Table(
            "What all kernels have. Their traits are in the table of their operation.",
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
            "The enumerations that kernels come from.",
            _words(
                "arch",
                "revision",
                "space",
                id="number of the lineage in this file",
                operation="what the kernels compute",
                variant="variant of the enumeration; attention: the mask implementation",
            ),
        ),
        "kernel_receipt": Table(
            "Which receipts, upstream's numbered product subsets, list a kernel.",
            _words(kernel_id=_KERNEL_ID, receipt="number of the receipt; table rule has what it is"),
        ),
        "population": Table(
            "What was made into rows, from which spec.",
            _words(
                lineage="row of table lineage",
                receipts="receipts that it is restricted to, separated by spaces; empty: all",
                restriction="by sweep files, an expression or a filter, in words; empty: none",
                digest="SHA-256 of the spec and of the SQL made from it",
                compute_units="compute units of the arch: selection rules ask for them",
                kernels="how many",
                families="how many of each family, a JSON object",
                seconds="how long it took",
                created=_CREATED,
            ),
        ),
        "rule": Table(
            "The rules that make, check and select kernels.",
            _words(
                "arch",
                "revision",
                "space",
                operation="what the kernels compute",
                kind="variant, constraint, receipt, hardware, headers, invariant, applicability or order",
                scope="enumeration or family that it is about; empty: all",
                id="name of the rule; of a receipt its number",
                position="place among the rules of its kind",
                expr="SQL expression over the columns of kernel",
                reason="why, in a sentence",
                source="file and function upstream",
                quirk="what is odd about it upstream; NULL: nothing",
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
                flags="of the compiler",
                status="built, failed, or quarantined: its first run ended the process or hung",
                log="output of the compiler, or the reason of the quarantine",
                so_sha256="SHA-256 of the library",
                so_bytes="size of the library",
                created=_CREATED,
                elsewhere="1: it came by a merge, and the library is another machine's",
                dropped="when the library went from the cache; NULL: it is there",
            ),
        ),
        "device": Table(
            "What kernels were timed on.",
            _words("arch", id="number of the device", name="product", facts="cores that kernels use, a JSON object"),
        ),
        "problem": Table(
            "Concrete calls that were timed, or asked for.",
            _words(
                id="number of the problem",
                key="its fields, canonical JSON",
                kind="what problems that are alike have in common, canonical JSON",
                operation="what is computed",
                **_SIZES,
            ),
        ),
        "timing": Table(
            "How fast a library is on a problem and device: statistics of launches, in ms.",
            _words(
                problem_id="id of the problem",
                kernel_id=_KERNEL_ID,
                device_id="id of the device",
                artifact_key="key of the library",
                cold="1: the caches were emptied before every launch",
                n="launches",
                min_ms="least of a launch",
                median_ms="median of undisturbed blocks of launches, by which selection orders kernels",
                p10_ms="10th percentile of the blocks",
                p90_ms="90th percentile of the blocks",
                low_ms="lower end of the median's 95 % confidence interval",
                high_ms="upper end of it",
                tflops="1e12 FLOP of the matrix products a second, by the median",
                gbps="1e9 bytes of all tensors, each once, a second, by the median",
                load="load average of the machine",
                clock_mhz="clock of the device; NULL: it does not say",
                created=_CREATED,
            ),
        ),
        "miss": Table(
            "Problems that were selected for an arch without a measurement: one row for each kind and size.",
            _words(
                "arch",
                bucket="the binary logarithms of their sizes, rounded down, and their kind",
                problem_id="row of table problem: one of them",
                n="how often; written as it doubles",
                last="when last, ISO 8601 in UTC",
            ),
        ),
    }
)
"""The tables of every catalog."""


def tables_of(operation: Operation) -> Mapping[str, Table]:
    """The views and tables that queries about an operation's kernels may read, the view with everything first."""
    meanings = _meanings(columns_of(operation))
    row = {name: meanings[name] for name in (*operation.traits.identity, *operation.traits)}
    return {
        view_of(operation.name): Table(
            f"Every kernel of {operation.name}, with what is known of it: traits, receipts, build and best timing.",
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
            | {name: meanings[name] for name in ("hw_valid", "dispatch_order")},
        ),
        **TABLES,
    }
