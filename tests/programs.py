"""Runs Python programs in turn: ``python programs.py PROGRAM OUTPUT PROGRAM OUTPUT ...``.

Each has a process of its own. PyTorch, which takes seconds to import, is imported once for all.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(program: str, output: str) -> None:
    """Run a program; leave its exit code in ``OUTPUT.rc``."""
    child = os.fork()
    if child == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, sys.stdout.fileno())
        os.dup2(file, sys.stderr.fileno())
        sys.argv[:] = [program]
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(f"{output}.rc").write_text(f"{code}\n")


if __name__ == "__main__":
    _, *words = sys.argv
    pairs = list(zip(words[::2], words[1::2], strict=True))
    if any("import torch" in Path(program).read_text(encoding="utf-8") for program, _ in pairs):
        import torch  # noqa: F401
    for program, output in pairs:
        run(program, output)
