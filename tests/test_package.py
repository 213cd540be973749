"""The package: no module needs itself, and what is published is complete.

The files of the sdist and of the wheel are checked, and the wheel at work, installed by itself.
"""

from __future__ import annotations

import ast
import email
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import missing

ROOT = Path(__file__).parent.parent
MOST_LINES = 500
CACHES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def module_paths():
    """The modules of the package, by name."""
    found = {}
    for path in (ROOT / "catalog").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def imports_of(node):
    """What the code below a node imports, in functions too, but not ``if TYPE_CHECKING:``; and what it names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            assert not child.level, "relative imports are not followed"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.Constant):
            yield child.value  # the name of a module, as import_module takes it
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from imports_of(ast.Module(child.orelse, []))
        else:
            yield from imports_of(child)


def executed(name):
    """A module and the packages around it, which are imported before it."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


@pytest.mark.slow
def test_no_import_comes_back_to_its_module():
    """Imports inside functions count: one that must be put off to avoid a cycle is in the wrong place."""
    modules = module_paths()
    graph = {name: set() for name in modules}
    for name, path in modules.items():
        for target in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(target, str) and target.startswith("catalog."):
                graph[name] |= executed(target) & modules.keys() - executed(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' <- '.join(error.args[1])}", pytrace=False)


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("schema", ("backends", "rules", "registry", "runtime", "cli")),
        ("ops", ("backends", "rules", "cli")),
        ("build/targets.py", ("backends",)),
        ("runtime/devices", ("backends", "rules", "cli")),
    ],
    ids=("schema", "ops", "targets", "devices"),
)
def test_lower_layers_do_not_import_higher_ones(lower, higher):
    """Imports inside functions count."""
    place = ROOT / "catalog" / lower
    for path in place.rglob("*.py") if place.is_dir() else [place]:
        for target in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(target, str) and target.startswith("catalog."):
                assert target.split(".")[1] not in higher, f"{path.relative_to(ROOT)} imports {target}"


def test_sources_are_short():
    """A file has one purpose."""
    folders = ("catalog", "tests", "docs", "examples", "benchmarks")
    sources = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in sources
        if path.suffix in {".py", ".hpp", ".h", ".cpp", ".c", ".sql", ".jinja", ".html"}
        and (lines := path.read_bytes().count(b"\n")) > MOST_LINES
    ]
    assert not long


@pytest.mark.parametrize("operation", ["attention", "gemm", "conv"])
def test_the_page_of_cuda_kernels_names_all_headers(operation):
    """Those in folders by their folder."""
    folder = ROOT / "catalog" / "ops" / operation / "kernels" / "cuda"
    page = (folder / "README.md").read_text(encoding="utf-8")
    places = {header.relative_to(folder) for header in folder.rglob("*.hpp")}
    named = {f"`{place.parts[0]}/`" if len(place.parts) > 1 else f"`{place}`" for place in places}
    assert {name for name in named if name not in page} == set()


def files_below(folder):
    """The files that belong to a folder, relative to it."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not CACHES & set(path.parts)}


def built(kind, source, folder):
    """The archive of that kind which the build backend makes of ``source``."""
    if importlib.util.find_spec("hatchling") is None:
        missing("hatchling")
    code = f"import hatchling.build as b, sys; print(b.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, folder)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # none in older 3.10 and 3.11
        archive.extractall(folder)  # noqa: S202 - it is our own
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is built of the sdist, as installers do where there is no wheel."""
    return built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_sdist_has_what_builds_and_explains_the_package(sdist):
    assert {path.name for path in sdist.iterdir()} == {
        *("catalog", "data", "docs", "examples", "benchmarks", "tests", "pyproject.toml", "PKG-INFO"),
        *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml", ".gitignore"),
    }
    for folder in ("catalog", "data", "docs", "examples", "benchmarks"):
        assert files_below(sdist / folder) == files_below(ROOT / folder)
    assert [path.name for path in (sdist / "tests").iterdir()] == ["constraints.txt"], "which the Makefile reads"


def test_the_wheel_has_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    own = {name for name in names if ".dist-info/" not in name}
    package = {f"catalog/{name}" for name in files_below(ROOT / "catalog")}
    data = {f"catalog/_data/{name}" for name in files_below(ROOT / "data")}
    assert own == package | data
    for name in (
        "catalog/py.typed",
        "catalog/registry/migrations/001_initial_schema.sql",
        "catalog/build/abi/catalog_abi.h",
        "catalog/ops/attention/kernels/host/traits.hpp",
    ):
        assert name in own
    assert not [name for name in names if "test" in Path(name).name or CACHES & set(Path(name).parts)]
    assert (about["License-Expression"], about["License-File"]) == ("MIT", "LICENSE")
    assert metadata.replace("METADATA", "licenses/LICENSE") in names


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel. Dependencies are those of the tests: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    program = folder / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(program)]
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    return program


KERNEL = (
    "family = 'fwd' AND dtype = 'fp32' AND hdim_q = 32 AND mode = 'batch' AND mask = 'no' AND bias = 'no' "
    "AND NOT (lse OR dropout OR logits OR sink OR pad_d)"
)
CALL = ("--batch", "1", "--nhead-q", "2", "--seqlen-q", "33", "--hdim-q", "32", "--dtype", "fp32")


@pytest.mark.slow
def test_a_wheel_of_kernels_is_installed_served_and_uninstalled(installed, tmp_path):
    """On a machine without a compiler, a catalog, or libraries in the cache; pip looks at no index."""
    program, choices, here = installed.parent / "catalog", tmp_path / "choices.lock", tmp_path / "here"
    there = {"CATALOG_DB": tmp_path / "there.db", "CATALOG_CACHE_DIR": tmp_path / "there"}
    pack = ("wheel", "--where", KERNEL, "--build", "-o", tmp_path, "--format", "csv")
    wheel = run(program, *pack, cwd=tmp_path, **there).splitlines()[1].partition(",")[0]
    run(program, "run", *CALL, cwd=tmp_path, CATALOG_TRACE="calls.jsonl", CATALOG_COMPILE="false", **there)
    freeze = ("freeze", "--trace", "calls.jsonl", "-o", choices)
    run(program, *freeze, cwd=tmp_path, CATALOG_COMPILE="false", **there)
    pip = [sys.executable, "-m", "pip", "--python", installed, "--disable-pip-version-check", "--quiet"]
    before = files_below(installed.parent.parent)
    subprocess.run([*pip, "install", "--no-index", wheel], check=True)
    bare = {"PATH": "/nonexistent", "CATALOG_CACHE_DIR": here, "CATALOG_CXX": "/no/compiler", "HOME": tmp_path / "home"}
    for how in (
        {"CATALOG_DB": tmp_path / "here.db", "CATALOG_COMPILE": "false"},
        {"CATALOG_DB": "/nonexistent/catalog.db", "CATALOG_CHOICES": choices},
    ):
        ran = run(installed, program, "run", *CALL, "--validate", "--format", "csv", cwd=tmp_path, **bare, **how)
        row = dict(zip(*(line.split(",") for line in ran.splitlines()), strict=True))
        assert (row["compile_s"], row["validation"]) == ("0", "passed")
    assert not list(here.glob("*.so")), "nothing is copied"
    subprocess.run([*pip, "uninstall", "--yes", Path(wheel).name.partition("-")[0]], check=True)
    assert files_below(installed.parent.parent) == before
    refused = {"CATALOG_DB": tmp_path / "here.db", "CATALOG_COMPILE": "false"}
    assert "is not in the cache" in run(installed, program, "run", *CALL, cwd=tmp_path, code=1, **bare, **refused)


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import catalog.torch
from catalog.integrations import transformers

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()
prompt = {"inputs": torch.arange(3, 40)[None], "max_new_tokens": 8, "do_sample": False}
expected = model.generate(**prompt)

transformers.register()
model.set_attn_implementation("catalog")
assert torch.equal(model.generate(**prompt), expected)
print(catalog.torch.report())
"""


@pytest.mark.slow
def test_a_wheel_of_kernels_runs_a_model_where_nothing_can_be_compiled_or_downloaded(installed, tmp_path):
    if importlib.util.find_spec("transformers") is None:
        missing("transformers")
    there = {"CATALOG_DB": tmp_path / "there.db", "CATALOG_CACHE_DIR": tmp_path / "there"}
    here = {"CATALOG_DB": tmp_path / "here.db", "CATALOG_CACHE_DIR": tmp_path / "here"}
    bare = {"PATH": "/nonexistent", "CATALOG_CXX": "/no/compiler", "CATALOG_COMPILE": "false", "CATALOG_REMOTE": ""}
    answered = run(installed, "-c", MODEL, cwd=tmp_path, **there).strip()
    assert answered == "16 calls by the catalog's kernels, 0 by PyTorch's own attention"
    pack = ("wheel", "--where", "built", "-o", tmp_path, "--format", "csv")
    wheel = run(installed.parent / "catalog", *pack, cwd=tmp_path, **there).splitlines()[1].partition(",")[0]
    pip = [sys.executable, "-m", "pip", "--python", installed, "--disable-pip-version-check", "--quiet"]
    assert run(installed, "-c", MODEL, cwd=tmp_path, **here, **bare).startswith("0 calls by the catalog's kernels")
    subprocess.run([*pip, "install", "--no-index", wheel], check=True)
    try:
        assert run(installed, "-c", MODEL, cwd=tmp_path, **here, **bare).strip() == answered
    finally:
        subprocess.run([*pip, "uninstall", "--yes", Path(wheel).name.partition("-")[0]], check=True)
    assert not list((tmp_path / "here").glob("*.so")), "nothing is copied"


def other_pythons():
    """Pythons of this machine that the package is for and the tests do not run by, one a minor version."""
    places = [*Path(sys.base_prefix).parent.glob("*/bin"), Path("/usr/bin"), Path("/usr/local/bin")]
    found = {}
    for place in places:
        for path in place.glob("python3.*"):
            minor = path.name.removeprefix("python3.")
            if minor.isdecimal() and int(minor) >= 10 and int(minor) != sys.version_info.minor:
                found.setdefault(path.name, path)
    return [found[name] for name in sorted(found)]


def run(program, *words, cwd, code=0, **variables):
    hidden = ("PYTHONPATH", "CATALOG_DATA_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {name: str(value) for name, value in variables.items()}
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def assert_does_the_demos_job(program, folder):
    shutil.copy(ROOT / "examples" / "demo.py", folder / "job.py")
    printed = run(program, "job.py", cwd=folder)
    assert "PASS: 34,889 kernels" in printed
    assert printed.splitlines()[-1].startswith("All good")


@pytest.mark.slow
def test_the_installed_package_does_the_demos_job_from_any_folder(installed, tmp_path):
    where = run(installed, "-c", "import catalog; print(catalog.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent.parent)
    assert_does_the_demos_job(installed, tmp_path)
    assert "No kernel is quarantined" in run(
        installed.parent / "catalog", "cache", "unquarantine", "--all", cwd=tmp_path
    )
    assert files_below(tmp_path) == {"job.py"}


@pytest.mark.slow
@pytest.mark.parametrize("python", other_pythons(), ids=lambda path: path.name)
def test_the_wheel_and_what_it_depends_on_work_with_every_python_here(python, wheel, tmp_path):
    """Unlike above, an installer chooses the dependencies, for that Python."""
    create = [python, "-m", "venv", "--without-pip", tmp_path / "venv"]
    made = subprocess.run(create, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        missing(f"the module venv of {python}")
    program = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", program, "install", "--quiet", "--no-compile", wheel]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing(f"an index to install from, or a dependency for {python.name} in it ({done.stderr.strip()[-300:]})")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert_does_the_demos_job(program, folder)
    assert files_below(folder) == {"job.py"}


@pytest.mark.slow
def test_type_checkers_see_the_types(installed, tmp_path):
    spec = run(installed, "-c", "import importlib.resources as r; print(r.files('catalog') / 'py.typed')", cwd=tmp_path)
    assert Path(spec.strip()).is_file()
