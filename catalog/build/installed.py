"""Installed libraries: folders of distributions that bring compiled kernels along, such as wheels of ``catalog wheel``.

Each is a package that an entry point names. Its entries are those of a cache, and they are only read.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from catalog.build.permissions import require_safe
from catalog.errors import CacheError
from catalog.plugins import entry_points_of

GROUP = "catalog.libraries"
"""The group of their entry points; each value is a package."""

MANIFEST = "manifest"
"""The file of a package that says what a catalog records of its libraries, with their timings; it may be absent."""

_log = logging.getLogger(__name__)


@functools.cache
def installed_folders() -> tuple[Path, ...]:
    """The folders with installed libraries, in the order of their entry points' names.

    A folder that cannot be used is left out, with a warning. Environments are looked at once.
    """
    folders = []
    for point in sorted(entry_points_of(GROUP), key=lambda point: point.name):
        try:
            [folder] = map(Path, point.load().__path__)
            require_safe(folder)
        except CacheError as error:
            _log.warning("the libraries of %s cannot be used: %s", point.value, error)
        except Exception as error:  # importing foreign code can raise anything
            _log.warning("the libraries of %s cannot be used: %s: %s", point.value, type(error).__name__, error)
        else:
            folders.append(folder)
    return tuple(folders)
