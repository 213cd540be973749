"""Files that appear whole."""

from __future__ import annotations

import os
from pathlib import Path

from catalog.errors import UsageError


def publish(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, whose folder is made when it is not there, and give it back.

    Raises:
        UsageError: it cannot be written; what was there before stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="Choose another --out.") from None
    return path
