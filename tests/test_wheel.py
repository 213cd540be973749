"""Wheels of compiled kernels: what they contain, how they are split, and that the cache serves them once installed."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, version
from pathlib import Path

import command
import pytest
from conftest import fill

from catalog.build import installed
from catalog.build.cache import Cache
from catalog.ops.attention.problem import Problem
from catalog.registry.timings import Timing
from catalog.rules.restriction import restriction
from catalog.runtime.catalog import Catalog
from catalog.runtime.measure import Measurement
from catalog.runtime.measuring import keep
from catalog.settings import settings

PROBLEMS = [Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=hdim, dtype="fp32") for hdim in (32, 64)]
HERE = "family = 'fwd' AND dtype = 'fp32' AND built"


@pytest.fixture(scope="module")
def folder(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog and a cache with a kernel each of two head dims, recorded as built and timed."""
    folder = tmp_path_factory.mktemp("wheels")
    catalog = Catalog(shutil.copy(host_file, folder / "catalog.db"))
    plans = [catalog.select(problem) for problem in PROBLEMS]
    fill(folder / "cache", [kernel for plan in plans for kernel in plan.kernels])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CATALOG_CACHE_DIR", str(folder / "cache"))
        settings.cache_clear()
        for plan in plans:
            [artifact], device = plan.build(), catalog.device_info("host")
            keep(catalog, plan.problem, device, [Timing(artifact.kernel_id, artifact.key, Measurement(9, *[0.5] * 6))])
    settings.cache_clear()
    return folder


@pytest.fixture
def wheel(folder: Path, tmp_path: Path) -> Callable[..., list[Path]]:
    """Runs ``catalog wheel`` and returns the wheels."""

    def wheel(*options: object) -> list[Path]:
        words = ("wheel", "--where", HERE, "-o", tmp_path / "dist", "--format", "json", *options)
        done = command.catalog(*words, db=folder / "catalog.db", CATALOG_CACHE_DIR=folder / "cache")
        assert done.returncode == 0, done.stderr
        return [Path(row["wheel"]) for row in json.loads(done.stdout)]

    return wheel


def test_a_wheel_has_the_entries_of_the_cache_and_what_installers_need(
    wheel: Callable[..., list[Path]], folder: Path
) -> None:
    [path] = wheel()
    first = path.read_bytes()
    assert wheel() == [path]
    assert path.read_bytes() == first, "equal libraries make equal files"
    made_by = version("kernel-catalog")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    information = path.name.rpartition("-py3-")[0]
    about = email.message_from_bytes(content[f"{information}.dist-info/METADATA"])
    assert (about["Version"], about["Requires-Dist"]) == (made_by, f"kernel-catalog=={made_by}")
    tags = email.message_from_bytes(content[f"{information}.dist-info/WHEEL"])
    assert (tags["Root-Is-Purelib"], path.name) == ("false", f"{information}-{tags['Tag']}.whl")
    if sys.platform == "linux":
        glibc = re.search(r"-manylinux_2_(\d+)_\w+\.whl$", path.name)
        assert glibc, path.name
        assert int(glibc[1]) <= int(os.confstr("CS_GNU_LIBC_VERSION").rpartition(".")[2])
    record = f"{information}.dist-info/RECORD"
    lines = {name: (digest, size) for name, digest, size in csv.reader(content[record].decode().splitlines())}
    assert lines.pop(record) == ("", "")
    for name, (digest, size) in lines.items():
        stated = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
        assert (stated, int(size)) == (hashlib.sha256(content[name]).digest(), len(content[name]))
    assert lines.keys() == content.keys() - {record}
    entries = {Path(name).name: data for name, data in content.items() if name.startswith("catalog_libraries_")}
    kept = {path.name: path.read_bytes() for path in (folder / "cache").iterdir() if path.suffix in {".so", ".json"}}
    assert entries == kept | {name: entries[name] for name in ("__init__.py", "manifest")}


def test_wheels_are_split_by_a_column_and_by_size(wheel: Callable[..., list[Path]]) -> None:
    by_hdim = wheel("--split", "hdim_q", "--name", "Kernels_Of.Mine")
    assert [path.name.partition("-")[0] for path in by_hdim] == [f"kernels_of_mine_hdim_q_{n}" for n in (32, 64)]
    largest = max(path.stat().st_size for path in by_hdim)
    limit = largest + 9000
    parts = wheel("--max-size", limit)
    assert [path.name.partition("-")[0][-7:] for path in parts] == ["_part_1", "_part_2"]
    assert all(path.stat().st_size <= limit for path in parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--where", "hdim_q = 129"), "no kernel meets the expression: nothing to pack"),
        (("--where", "family = 'fwd' AND dtype = 'fp32' AND hdim_q = 32"), r"not built:\n    fmha_fwd_.*\n.*--build"),
        (("--max-size", "10K"), "alone takes .* more than a wheel of 10.0 KiB"),
        (("--split", "nope"), "no such column: 'nope'"),
        (("--name", "kernel_catalog"), "not a name for a wheel"),
        (("--platform", "../x"), "not a platform tag"),
    ],
)
def test_what_cannot_be_packed_is_an_error_that_says_what_to_do(
    folder: Path, tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    words = ("wheel", *(() if "--where" in options else ("--where", HERE)), *options, "-o", tmp_path / "dist")
    done = command.catalog(*words, db=folder / "catalog.db", CATALOG_CACHE_DIR=folder / "cache")
    assert done.returncode == 2
    assert re.search(message, done.stderr, re.DOTALL), done.stderr
    assert not (tmp_path / "dist").exists()


@pytest.fixture
def installed_wheel(
    wheel: Callable[..., list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The package of a wheel as if it were installed, and an empty cache."""
    site = tmp_path / "site"
    [path] = wheel()
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    [package] = site.glob("catalog_libraries_*")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    point = EntryPoint(package.name, package.name, installed.GROUP)
    monkeypatch.setattr(installed, "entry_points_of", lambda group: [point])
    installed.installed_folders.cache_clear()
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield package
    monkeypatch.undo()
    installed.installed_folders.cache_clear()


def test_the_cache_serves_what_is_installed_and_keeps_nothing_of_it(
    installed_wheel: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(shutil.copy(folder / "catalog.db", tmp_path / "here.db"))
    for artifact in (artifact for problem in PROBLEMS for artifact in catalog.select(problem).build()):
        assert artifact.cached
        assert artifact.path.parent == installed_wheel
    assert Cache(tmp_path / "cache").keys() == set()


def test_a_new_catalog_selects_by_the_timings_that_a_wheel_brings(
    installed_wheel: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Catalog(tmp_path / "new.db") as catalog:
        spec = catalog.spec("host")
        some = restriction(spec, (), "dtype = 'fp32' AND hdim_q IN (32, 64) AND mask = 'no'", None, ("fwd",))
        catalog.populate(spec.arch or "", restriction=some)
        for problem in PROBLEMS:
            choice = catalog.choice(problem)
            assert (choice.evidence, choice.candidates[0].median_ms) == ("measured", 0.5)
    (installed_wheel / installed.MANIFEST).write_text("{}")
    with Catalog(tmp_path / "other.db") as catalog:
        catalog.populate(spec.arch or "", restriction=some)
        assert catalog.choice(PROBLEMS[0]).evidence == "static"
    assert "cannot be used" in caplog.text


def test_a_damaged_installed_library_is_not_served(installed_wheel: Path, folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    keys = cache.all_keys()
    assert len(keys) == 2
    for path in installed_wheel.glob("*.so"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert [cache.load(key) for key in keys] == [None, None]


def test_a_package_that_others_may_write_to_is_left_out(
    installed_wheel: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed_wheel.chmod(0o777)
    assert Cache(tmp_path / "cache").all_keys() == set()
    assert "cannot be used" in caplog.text
