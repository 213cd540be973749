"""The whole conformance run of an arch, in a scratch catalog: only compiled kernels are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from catalog.backends import spec_folders
from catalog.conformance.findings import Finding, OnFinding, Report, failed, skipped
from catalog.conformance.kernels import STEPS, kernel_findings
from catalog.conformance.rows import naming_findings, row_findings, rule_findings, spec_findings
from catalog.errors import CatalogError, SpecError, UsageError
from catalog.ops import DEFAULT, operation
from catalog.runtime.catalog import Catalog
from catalog.runtime.catalog_file import spec_path
from catalog.runtime.here import resolve_arch
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.spec_files import find_spec, known_archs


@dataclass(frozen=True, slots=True)
class ConformanceOptions:
    """What to check.

    Attributes:
        arch: name of the arch; ``host`` is this machine's CPU.
        revision: revision of the spec; None: the arch's own.
        build: also build a kernel of each family, and run it if this machine has the device.
        jobs: number of parallel compilers; None: one per core.
        operation: what the kernels compute.
    """

    arch: str
    revision: str | None = None
    build: bool = True
    jobs: int | None = None
    operation: str = DEFAULT


def check_arch(options: ConformanceOptions, on_finding: OnFinding | None = None) -> Report:
    """Run all checks of an arch; ``on_finding`` is called with each finding as it is made.

    Raises:
        UsageError: there is no such arch or revision.
        DeviceError: ``host``, and no host arch runs on this CPU.
    """
    arch, findings = resolve_arch(options.arch), list[Finding]()
    with tempfile.TemporaryDirectory(prefix="catalog-") as folder, closing(Catalog(Path(folder) / "catalog.db")) as own:
        for finding in _findings(own, arch, options):
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)
    return Report(arch, options.revision, findings)


def asked_archs(
    names: Sequence[str], revision: str | None = None, operation: str = DEFAULT
) -> list[tuple[str, str | None]]:
    """The archs to check, each with a revision (None: its own).

    Without ``names``, all that have specs, in every revision.

    Raises:
        UsageError: there is no such arch, revision or operation.
        DeviceError: ``host``, and no host arch runs on this CPU.
    """
    archs = [resolve_arch(name) for name in names]
    if archs:
        for arch in archs:
            find_spec(spec_folders(arch, operation), arch, revision)
        return [(arch, revision) for arch in archs]
    known = known_archs(*spec_folders(of=operation))
    found = [(arch, one) for arch, its in known.items() for one in its if revision in (None, one)]
    if not found:
        every = sorted({one for its in known.values() for one in its})
        raise UsageError(f"no arch has a revision {revision!r}", hint=f"There are: {', '.join(every)}.")
    return [(arch, one if len(known[arch]) > 1 else None) for arch, one in found]


def _findings(catalog: Catalog, arch: str, options: ConformanceOptions) -> Iterator[Finding]:
    try:
        spec = catalog.spec(arch, options.revision, operation=options.operation)
    except SpecError as error:
        yield failed("spec", arch, str(error))
        return
    path = spec_path(arch, spec.revision, of=options.operation)
    found = list(spec_findings(spec, path))
    yield from found
    try:
        yield from _of_rows(catalog, spec, path)
        if options.build:
            yield from kernel_findings(catalog, spec, options.jobs)
        else:
            yield from (skipped(step, family, "not requested") for family in spec.families for step in STEPS)
    except SpecError as error:
        yield failed("spec", arch, str(error))


def _of_rows(catalog: Catalog, spec: ArchSpec, path: Path) -> Iterator[Finding]:
    for variant in spec.variants:
        try:
            yield from row_findings(catalog, spec, variant)
            yield from rule_findings(catalog, spec, variant, path)
        except CatalogError as error:
            yield failed("rows", str(spec.arch), f"{error}{operation(spec.operation).about_variant(variant)}")
    yield from naming_findings(spec)
