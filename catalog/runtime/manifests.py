"""Manifests of libraries that come from elsewhere, in bundles and in installed packages: recorded in a catalog."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Set

from pydantic import ValidationError

from catalog.build.bundle import MOST_MANIFEST_BYTES, Manifest, abi, parsed_manifest
from catalog.build.installed import MANIFEST, installed_folders
from catalog.errors import BundleError
from catalog.files import read_own
from catalog.registry.artifacts import record_artifact
from catalog.registry.rows import Device, Timing
from catalog.registry.timings import add_timings, timings_of
from catalog.registry.transactions import transaction

_log = logging.getLogger(__name__)


def valid_timings(connection: sqlite3.Connection, keys: Set[str]) -> tuple[Timing, ...]:
    """The valid timings of these libraries; invalid ones, such as from a wrong clock, would be rejected on import."""
    timings = []
    for row in timings_of(connection, keys):
        device = {name: row.pop(name) for name in Device.model_fields}
        with contextlib.suppress(ValidationError):
            timings.append(Timing.model_validate({**row, "device": device}))
    return tuple(timings)


def record_manifest(connection: sqlite3.Connection, manifest: Manifest) -> tuple[int, int]:
    """Record the entries that have rows in the catalog; return the numbers of recorded libraries and of new timings.

    Raises:
        sqlite3.IntegrityError, OverflowError: a value cannot be in a catalog.
    """
    asked = "SELECT 1 FROM kernel WHERE id = ?"
    known = [entry for entry in manifest.entries if connection.execute(asked, [entry.kernel.id]).fetchone()]
    for entry in known:
        record_artifact(connection, entry.artifact.columns)
    kernels = {entry.artifact.key: entry.kernel.id for entry in known}
    timings = [
        timing.model_dump(exclude={"device"}) | timing.device.model_dump() | {"kernel_id": kernels[timing.artifact_key]}
        for timing in manifest.timings
        if timing.artifact_key in kernels
    ]
    return len(known), add_timings(connection, timings)


def record_installed(connection: sqlite3.Connection) -> None:
    """Record the libraries and timings of installed packages whose kernels are in the catalog.

    A package without a manifest has nothing to record. One whose manifest cannot be used is left out, with a warning.

    Raises:
        RegistryError: the catalog cannot be written.
    """
    for folder in installed_folders():
        try:
            manifest = parsed_manifest(read_own(folder / MANIFEST, MOST_MANIFEST_BYTES), folder)
            if manifest.abi == abi():
                with transaction(connection):
                    record_manifest(connection, manifest)
        except FileNotFoundError:
            continue
        except (OSError, OverflowError, BundleError, sqlite3.IntegrityError) as error:
            _log.warning("the timings of %s cannot be used: %s", folder, error)
