"""Every example runs as its README says, checks itself, and is listed with the first line of its docstring."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import missing, slow_but

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
QUICK = [EXAMPLES / "basic.py"]
TIMEOUT_S = 120.0
SHORTER = {
    "train_gpt": ("--steps", "3", "--batch", "1", "--context", "64"),
    "train_resnet": ("--steps", "3", "--batch", "2", "--backend", "aot_eager"),
    "continuous_batching": ("--requests", "8", "--pages", "12"),
}
NEEDS = dict.fromkeys(("train_gpt", "train_resnet", "gemm_pytorch", "conv_pytorch"), "torch")
NEEDS |= {"continuous_batching": "transformers", "diffusion_pipeline": "diffusers"}
NO_GPU = re.compile(r"^.*No CUDA runtime is found, using CUDA_HOME=.*\n", re.MULTILINE)
"""A warning of PyTorch's compiler on a machine with nvcc and without a GPU."""

ROW = re.compile(r"^\| \[(\w+\.py)\]\(\1\) \| (.+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def catalog_file(host_file, tmp_path_factory):
    """A catalog that the examples share: every arch is populated once."""
    return shutil.copy(host_file, tmp_path_factory.mktemp("examples") / "catalog.db")


@pytest.mark.parametrize("script", slow_but(QUICK, SCRIPTS), ids=[script.stem for script in SCRIPTS])
def test_example_runs(script, catalog_file, tmp_path):
    if find_spec(NEEDS.get(script.stem, "numpy")) is None:
        missing(NEEDS[script.stem])
    command = [sys.executable, str(script), *SHORTER.get(script.stem, ())]
    environment = {**os.environ, "CATALOG_DB": str(catalog_file)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert not NO_GPU.sub("", done.stderr), "an example that works has nothing to complain about"
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir())


def test_readme_lists_every_example_with_its_docstring():
    listed = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    docstrings = [ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "" for script in SCRIPTS]
    assert sorted(listed) == [
        (script.name, text.split("\n")[0]) for script, text in zip(SCRIPTS, docstrings, strict=True)
    ]


def test_the_projects_readme_names_the_examples():
    assert "examples/" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
