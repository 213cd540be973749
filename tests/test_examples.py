"""Every example runs as its README says, checks itself, and is listed with the first line of its docstring."""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import missing

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TIMEOUT_S = 60.0
SHORTER = {"train_gpt": ("--steps", "3", "--batch", "1", "--context", "64")}
NEEDS = {"train_gpt": "torch"}
ROW = re.compile(r"^\| \[(\w+\.py)\]\(\1\) \| (.+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The examples that are asked for, under way: two at a time, for most of them compile on one core.

    They share a catalog and a cache: every arch is populated once, every kernel compiled once.
    """
    folder = tmp_path_factory.mktemp("examples")
    environment = {**os.environ, "CATALOG_DB": str(folder / "catalog.db"), "CATALOG_CACHE_DIR": str(folder / "cache")}

    def run(script):
        elsewhere = folder / script.stem
        elsewhere.mkdir()
        command = [sys.executable, str(script), *SHORTER.get(script.stem, ())]
        done = subprocess.run(
            command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        return done, list(elsewhere.iterdir())

    asked = {item.callspec.params["script"]: None for item in request.session.items if "runs" in item.fixturenames}
    pool = ThreadPoolExecutor(2)
    yield {script: pool.submit(run, script) for script in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script, runs):
    if find_spec(NEEDS.get(script.stem, "numpy")) is None:
        missing(NEEDS[script.stem])
    done, left_behind = runs[script].result()
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "an example that works has nothing to complain about"
    assert done.stdout.strip()
    assert not left_behind


def test_readme_lists_every_example_with_its_docstring():
    listed = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    docstrings = [ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "" for script in SCRIPTS]
    assert sorted(listed) == [
        (script.name, text.split("\n")[0]) for script, text in zip(SCRIPTS, docstrings, strict=True)
    ]


def test_the_projects_readme_names_the_examples():
    assert "examples/" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
