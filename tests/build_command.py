"""``catalog build`` as a process of its own, which Ctrl-C reaches."""

from __future__ import annotations

import sys

WHERE = "family = 'fwd_appendkv' AND NOT paged_kv"
"""The host's kernels that compile fastest."""

_START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from catalog.__main__ import main
main()
"""


def build_command(*words: str, before: str = "") -> list[str]:
    """Build :data:`WHERE` with the options ``words``, after the Python statements ``before``."""
    return [sys.executable, "-c", before + _START, "build", WHERE, "--verbose", *words]
