"""What a library reports about the row that it was built from."""

from __future__ import annotations

import json

from catalog.schema.kernel import Kernel


def describe(kernel: Kernel) -> str:
    """The JSON returned by ``catalog_describe``: the kernel's canonical JSON with its id and name."""
    described = json.loads(kernel.canonical_json) | {"id": kernel.id, "name": kernel.name}
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def c_string(kernel: Kernel) -> str:
    """:func:`describe` as a C string literal: ASCII, with quotes and backslashes escaped."""
    return json.dumps(describe(kernel))
