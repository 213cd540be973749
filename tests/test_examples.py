"""Every example runs as its README says, checks itself, and is listed with the first line of its docstring."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
ROW = re.compile(r"^\| \[(\w+\.py)\]\(\1\) \| (.+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A catalog and a cache that all examples share: every arch is populated, every kernel compiled once."""
    folder = tmp_path_factory.mktemp("examples")
    return {**os.environ, "CATALOG_DB": str(folder / "catalog.db"), "CATALOG_CACHE_DIR": str(folder / "cache")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script, environment, tmp_path):
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "an example that works has nothing to complain about"
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_readme_lists_every_example_with_its_docstring():
    listed = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    docstrings = [ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "" for script in SCRIPTS]
    assert sorted(listed) == [
        (script.name, text.split("\n")[0]) for script, text in zip(SCRIPTS, docstrings, strict=True)
    ]


def test_the_projects_readme_names_the_examples():
    assert "examples/" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
