"""What a library reports about itself: the row that it was built from, and the workspaces that it uses."""

from __future__ import annotations

import json

from catalog.ops.attention.stages import WORKSPACES, workspaces_of
from catalog.schema.kernel import Kernel


def describe(kernel: Kernel) -> str:
    """The JSON returned by ``catalog_describe``: the kernel's canonical JSON with its id and name."""
    described = json.loads(kernel.canonical_json) | {"id": kernel.id, "name": kernel.name}
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def uses(kernel: Kernel) -> str:
    """The initializers of the C++ struct ``catalog::Uses``."""
    used = workspaces_of(kernel)
    return ", ".join(str(name in used).lower() for name in WORKSPACES)
