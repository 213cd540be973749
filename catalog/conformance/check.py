"""The whole conformance run of an arch, in a scratch catalog: only compiled kernels are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from catalog import settings
from catalog.conformance.findings import Finding, OnFinding, Report, failed, skipped
from catalog.conformance.kernels import STEPS, kernel_findings
from catalog.conformance.rows import naming_findings, row_findings, rule_findings, spec_findings
from catalog.errors import CatalogError, SpecError
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.here import resolve_arch
from catalog.schema.arch_spec import ArchSpec


@dataclass(frozen=True, slots=True)
class ConformanceOptions:
    """What to check.

    Attributes:
        arch: its name; ``host`` is this machine's CPU.
        revision: of its spec; None: the arch's own.
        build: also build a kernel of each family, and run it where the device is here.
        jobs: compilers at once; None: one a core.
    """

    arch: str
    revision: str | None = None
    build: bool = True
    jobs: int | None = None


def check_arch(options: ConformanceOptions, on_finding: OnFinding | None = None) -> Report:
    """Everything that a new arch must pass; ``on_finding`` hears of each finding as it comes.

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
    return Report(arch, findings)


def _findings(catalog: Catalog, arch: str, options: ConformanceOptions) -> Iterator[Finding]:
    try:
        spec = catalog.spec(arch, options.revision)
    except SpecError as error:
        yield failed("spec", arch, str(error))
        return
    path = settings.data_dir() / "arch_specs" / str(spec.revision) / f"{arch}.json"
    found = list(spec_findings(spec, path))
    yield from found
    try:
        yield from _of_rows(catalog, spec, path)
        if options.build:
            yield from kernel_findings(catalog, spec, next(iter(spec.mask_impls)), options.jobs)
        else:
            yield from (skipped(step, family.value, "not asked for") for family in spec.families for step in STEPS)
    except SpecError as error:
        yield failed("spec", arch, str(error))


def _of_rows(catalog: Catalog, spec: ArchSpec, path: Path) -> Iterator[Finding]:
    for mask_impl in spec.mask_impls:
        try:
            yield from row_findings(catalog, spec, mask_impl)
            yield from rule_findings(catalog, spec, mask_impl, path)
        except CatalogError as error:
            yield failed("rows", str(spec.arch), f"masks {mask_impl}: {error}")
    yield from naming_findings(spec)
