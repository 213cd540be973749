"""Writing the folder of an export: files that are already right stay untouched, obsolete files are removed.

``inventory.json`` marks a folder as an export and lists its files; nothing else in the folder is ever touched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from catalog.errors import BuildError, UsageError
from catalog.files import Sync, UnsafeFileError, parse_json, publish, read_given

INVENTORY = "inventory.json"
_FORMAT = 1
"""Format of the inventory; its key ``catalog_export`` marks a folder as an export."""


def write_export(folder: Path, files: Mapping[str, str], inventory: Mapping[str, Any]) -> list[Path]:
    """Make ``folder`` hold ``files`` and ``inventory`` with their names; return the files written or changed.

    Files that are already right keep their times; files of a previous export that are obsolete are removed. An
    interrupted export leaves a folder that the next one completes.

    Args:
        folder: the folder to write; made if it does not exist.
        files: texts by path relative to ``folder``, with slashes.
        inventory: JSON to write beside them.

    Raises:
        UsageError: the folder holds files but no export, or a link in it leads out of it.
        BuildError: it cannot be read or written.
    """
    listed = {"catalog_export": _FORMAT, **inventory, "files": sorted(files)}
    texts = {INVENTORY: json.dumps(listed, indent=1) + "\n", **files}  # inventory first: it marks the folder as ours
    try:
        for name in texts:
            if not _is_inside(folder, name):
                raise UsageError(f"{folder / name} leads out of {folder} by a link", hint="Choose another --out.")
        for name in _exported(folder) - set(texts):
            _remove(folder, name)
        return [path for name, text in texts.items() if _write(path := folder / name, text)]
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror}", hint="Choose another --out.") from None


def _exported(folder: Path) -> set[str]:
    """The files of the export in ``folder``; empty if the folder is empty or missing."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="Choose another --out.")
    if not folder.exists() or not any(folder.iterdir()):
        return set()
    try:
        inventory = parse_json(read_given(folder / INVENTORY))
        if inventory["catalog_export"] == _FORMAT:
            return {name for name in inventory["files"] if _is_inside(folder, name)}
    except (FileNotFoundError, UnsafeFileError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(
        f"{folder} is not empty and has no {INVENTORY} of an export", hint="Choose another --out, or empty it."
    )


def _is_inside(folder: Path, name: str) -> bool:
    """Whether ``name`` leads to a file below ``folder``, not out of it, nor through a link out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _remove(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a folder that is not empty stays
        if path.parent != folder:
            path.parent.rmdir()


def _write(path: Path, text: str) -> bool:
    """Write the file atomically if it differs; return whether it did."""
    content = text.encode()
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, content, Sync.NONE)  # no sync needed: the next export compares the contents again
    return True
