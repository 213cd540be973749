"""Real build tools over exported folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import ninja
from conftest import missing

from catalog.build.export.projects import ProjectFormat

_COMPILED = {
    ProjectFormat.CMAKE: re.compile(r"Building CXX object CMakeFiles/\w+\.dir/(\S+)\.cpp\.o"),
    ProjectFormat.MAKE: re.compile(r"^\[\d+/\d+\] (\S+)$", re.MULTILINE),
    ProjectFormat.NINJA: re.compile(r"^\[\d+/\d+\] compile (\S+)\.cpp$", re.MULTILINE),
}


def _tool(name: str) -> str:
    # Older ninjas than the package's misread quotes in lists of headers.
    return shutil.which(name, path=ninja.BIN_DIR) or shutil.which(name) or missing(name)


def build(form: ProjectFormat, folder: Path, **variables: str) -> list[str]:
    """Build the project in ``folder``; the sources that were compiled, in the tool's order, without their suffix."""
    commands = {
        ProjectFormat.CMAKE: [["-S", str(folder), "-B", str(folder / "build")], ["--build", str(folder / "build")]],
        ProjectFormat.MAKE: [["-C", str(folder)]],
        ProjectFormat.NINJA: [["-C", str(folder)]],
    }[form]
    output = ""
    for words in commands:
        done = subprocess.run(
            [_tool(form.value), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "LC_ALL": "C", **variables},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    return _COMPILED[form].findall(output)


def library(form: ProjectFormat, folder: Path, name: str) -> Path:
    """Where the tool puts the library."""
    return folder / "build" / name if form is ProjectFormat.CMAKE else folder / name
