"""Bundles: built once, shipped, checked in every byte, and taken in whole or not at all."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import pytest
from conftest import fill
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from catalog.build.cache import Cache
from catalog.build.permissions import require_private
from catalog.errors import BundleError, CacheError, RegistryError, UsageError
from catalog.ops import read_kernel
from catalog.ops.attention.problem import Problem
from catalog.registry import rows
from catalog.registry.timings import MEASURED, Timing, record
from catalog.registry.transactions import transaction
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.exchange import export_bundle, import_bundle
from catalog.runtime.inputs import make_inputs
from catalog.runtime.measure import Measurement
from catalog.runtime.plan import Plan
from catalog.settings import settings

PROBLEM = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")
DECODE = Problem(op="splitkv", batch=1, nhead_q=2, seqlen_q=1, seqlen_k=600, hdim_q=32, dtype="fp32")


@dataclass
class Shipped:
    """A bundle, the catalog that it was exported from, and an empty copy of that catalog to import into."""

    path: Path
    source: Catalog
    empty: Path
    plans: list[Plan]

    @property
    def keys(self) -> list[str]:
        return [row[0] for row in self.source.connection.execute("SELECT key FROM artifact ORDER BY key")]


@pytest.fixture(scope="module")
def shipped(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    folder = tmp_path_factory.mktemp("shipped")
    catalog = Catalog(shutil.copy(host_file, folder / "catalog.db"))
    shutil.copy(host_file, folder / "empty.db")
    plans = [catalog.select(problem) for problem in (PROBLEM, DECODE)]
    cache = fill(folder / "cache", [kernel for plan in plans for kernel in plan.kernels])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CATALOG_CACHE_DIR", str(cache))
        settings.cache_clear()
        for plan in plans:
            for artifact in plan.build():
                time_it(catalog, plan.problem, artifact.key)
        done = export_bundle(catalog, "dtype='fp32'", folder / "kernels.bundle", arch=plans[0].arch)
    settings.cache_clear()
    assert (done.libraries, done.timings, done.bytes) == (3, 3, (folder / "kernels.bundle").stat().st_size)
    [(selected,)] = catalog.connection.execute("SELECT count(*) FROM attention_row WHERE dtype = 'fp32'")
    assert done.unbuilt == selected - 3
    return Shipped(folder / "kernels.bundle", catalog, folder / "empty.db", plans)


def test_timings_of_older_bundles_are_of_the_policy_of_their_time() -> None:
    stated = {"artifact_key": "0" * 64, "problem": PROBLEM.key, "device": {"arch": "a", "name": "b", "facts": "{}"}}
    stated |= dict.fromkeys(("min_ms", "median_ms", "p10_ms", "p90_ms", "low_ms", "high_ms", "tflops", "gbps"), 1.0)
    stated |= {"cold": 0, "n": 9, "load": None, "clock_mhz": None, "created": "2026-01-01T00:00:00+00:00"}
    assert rows.Timing.model_validate(stated).measured_as == "graph"


GPU = DeviceInfo("gfx950", "a device", 3)


def time_it(catalog: Catalog, problem: Problem, key: str) -> None:
    """A timing that selection has no use for: of a device of another arch."""
    [(kernel_id,)] = catalog.connection.execute("SELECT kernel_id FROM artifact WHERE key = ?", [key])
    measurement = Measurement(9, 0.1, 1.5, 0.2, 2.5, 1.0, 2.0, load=0.5)
    with transaction(catalog.connection):
        record(catalog.connection, problem, GPU, [Timing(kernel_id, key, measurement)])


@pytest.fixture
def here(shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog and a cache of another machine, with nothing built."""
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    return Catalog(shutil.copy(shipped.empty, tmp_path / "here.db"))


def contents(catalog: Catalog) -> list[list[tuple[Any, ...]]]:
    """What a bundle carries, as the catalog has it."""
    measured = (
        f"SELECT problem.key, kind, size_5, device.arch, name, facts, timing.kernel_id, {', '.join(MEASURED[:-1])}, "
        "timing.created FROM timing JOIN problem ON problem.id = problem_id "
        "JOIN device ON device.id = device_id ORDER BY problem.key, artifact_key"
    )
    queries = ("SELECT * FROM artifact ORDER BY key", measured)
    return [[tuple(row) for row in catalog.connection.execute(query)] for query in queries]


def assert_nothing_written(catalog: Catalog) -> None:
    assert contents(catalog) == [[], []]
    cache = settings().cache_dir
    assert [path for path in cache.rglob("*") if path.is_file() and path.parent.name != "locks"] == []


def test_what_was_built_there_runs_here(shipped: Shipped, here: Catalog) -> None:
    done = import_bundle(here, shipped.path, trust=True)
    assert (done.new, done.present, done.no_rows, done.timings) == (3, 0, 0, 3)
    assert contents(here) == contents(shipped.source)
    again = import_bundle(here, shipped.path, trust=True)
    assert (again.new, again.present, again.timings) == (0, 3, 0)
    assert contents(here) == contents(shipped.source)

    for plan in shipped.plans:
        inputs = make_inputs(plan.problem)
        expected = plan.run(inputs)
        # The same compiler finds them by their content keys, without a compiler they are served all the same.
        for catalog in (here, Catalog(here.path, compile=False)):
            result = catalog.select(plan.problem).run(inputs)
            assert (result.kernels, result.compile_seconds) == (expected.kernels, 0)
            assert (result.outputs["o"] == expected.outputs["o"]).all()


@pytest.mark.slow
def test_a_catalog_that_lacks_the_arch_is_populated(shipped: Shipped, here: Catalog, tmp_path: Path) -> None:
    fresh = Catalog(tmp_path / "fresh.db")
    assert import_bundle(fresh, shipped.path, trust=True).no_rows == 0
    assert contents(fresh) == contents(shipped.source)


def test_what_is_sound_already_stays(shipped: Shipped, here: Catalog) -> None:
    import_bundle(here, shipped.path, trust=True)
    sound, damaged, gone = (settings().cache_dir / f"{key}.so" for key in shipped.keys)
    before = sound.stat().st_mtime_ns
    content = damaged.read_bytes()
    damaged.write_bytes(b"damaged")
    gone.with_suffix(".json").unlink()
    assert import_bundle(here, shipped.path, trust=True).new == 2
    assert (sound.stat().st_mtime_ns, damaged.read_bytes()) == (before, content)


def test_equal_exports_have_equal_libraries_and_whatever_is_not_sound_stays_at_home(
    shipped: Shipped, here: Catalog, tmp_path: Path
) -> None:
    import_bundle(here, shipped.path, trust=True)
    quarantined, damaged, kept = shipped.keys
    here.connection.execute("UPDATE artifact SET status = 'quarantined' WHERE key = ?", [quarantined])
    (settings().cache_dir / f"{damaged}.so").write_bytes(b"damaged")
    done = export_bundle(here, "", tmp_path / "again.bundle")
    assert (done.libraries, done.timings) == (1, 1)
    with zipfile.ZipFile(tmp_path / "again.bundle") as again, zipfile.ZipFile(shipped.path) as first:
        assert again.namelist() == ["manifest.json", f"libraries/{kept}.so"]
        assert again.read(f"libraries/{kept}.so") == first.read(f"libraries/{kept}.so")
    with pytest.raises(UsageError, match="no kernel meets"):
        export_bundle(here, "hdim_q = 7", tmp_path / "none.bundle")
    with pytest.raises(UsageError, match="none of "):
        export_bundle(here, "hdim_q = 128", tmp_path / "none.bundle")
    with pytest.raises(BundleError, match="nowhere"):
        export_bundle(here, "", tmp_path / "nowhere" / "x.bundle")
    assert not (tmp_path / "none.bundle").exists()


# Damage


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_found_before_anything_is_written(
    shipped: Shipped, here: Catalog, tmp_path: Path, where: float, flip: int
) -> None:
    data = bytearray(shipped.path.read_bytes())
    data[int(where * len(data))] ^= flip
    (tmp_path / "damaged.bundle").write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        import_bundle(here, tmp_path / "damaged.bundle", trust=True)
    assert_nothing_written(here)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, -1])
def test_part_of_a_bundle_is_no_bundle(size: int, shipped: Shipped, here: Catalog, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(shipped.path.read_bytes()[:size])
    for path in (tmp_path / "part", tmp_path / "absent", tmp_path, here.path):
        with pytest.raises(BundleError):
            import_bundle(here, path, trust=True)
    assert_nothing_written(here)


# Bundles that somebody has changed, and sealed again


def seal(path: Path) -> None:
    data = path.read_bytes()[:-64]
    path.write_bytes(data + hashlib.sha256(data).hexdigest().encode())


def repack(source: Path, target: Path, edit: Callable[[dict[str, bytes]], None]) -> None:
    """The bundle with other members, sealed; a member whose name ends with a star is written twice."""
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # names that are there twice
        archive.comment = b"0" * 64
        for name, data in members.items():
            for _ in range(2 if name.endswith("*") else 1):
                archive.writestr(name.rstrip("*"), data)
    seal(target)


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, bytes]], None]:
    def edit(members: dict[str, bytes]) -> None:
        found = json.loads(members["manifest.json"])
        change(found)
        members["manifest.json"] = json.dumps(found).encode()

    return edit


def first(part: str, **values: object) -> Callable[[dict[str, bytes]], None]:
    """Values of the first entry, of its kernel or of its record."""
    return manifest(lambda m: (m["entries"][0] if part == "entry" else m["entries"][0][part]).update(values))


def other_lse(signature: dict[str, Any]) -> None:
    signature["lse"] = not signature["lse"]


def library(members: dict[str, bytes]) -> str:
    return next(name for name in members if name.startswith("libraries/"))


def rename(new: str) -> Callable[[dict[str, bytes]], None]:
    """The first library under another name, and under the key that would have that name."""

    def edit(members: dict[str, bytes]) -> None:
        old = library(members)
        members[new] = members.pop(old)
        first("artifact", key=new.removeprefix("libraries/").removesuffix(".so"))(members)

    return edit


FOREIGN = "aarch64" if os.uname().machine == "x86_64" else "x86_64_v3"


def foreign(members: dict[str, bytes]) -> None:
    """All of it for a CPU that this one is not."""

    def change(found: dict[str, Any]) -> None:
        for entry in found["entries"]:
            entry["kernel"]["arch"] = FOREIGN
            entry["artifact"] |= {"arch": FOREIGN, "isa": "armv8-a" if FOREIGN == "aarch64" else "x86-64-v3"}
            entry["artifact"]["kernel_id"] = read_kernel(entry["kernel"]).id

    manifest(change)(members)


AHEAD = "2990-01-01T00:00:00+00:00"

CHANGES: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "no manifest": (lambda m: m.pop("manifest.json"), "manifest.json cannot be read"),
    "no JSON": (lambda m: m.update({"manifest.json": b"{"}), "is not JSON"),
    "deep JSON": (lambda m: m.update({"manifest.json": b"[" * 10**5}), "is not JSON"),
    "a list": (lambda m: m.update({"manifest.json": b"[]"}), "format None"),
    "another format": (manifest(lambda m: m.update(format=2)), "format 2; this version knows 1"),
    "another ABI": (manifest(lambda m: m.update(abi=99)), "ABI 99; this version has ABI"),
    "more in the manifest": (manifest(lambda m: m.update(run="me")), "run: unknown field"),
    "less in a record": (manifest(lambda m: m["entries"][0]["artifact"].pop("isa")), "isa"),
    "a number for a text": (first("artifact", log=1), "log"),
    "a huge number": (manifest(lambda m: m["timings"][0].update(n=10**30)), "n: must be below"),
    "no finite number": (manifest(lambda m: m["timings"][0].update(gbps=float("inf"))), "gbps"),
    "another trait": (manifest(lambda m: other_lse(m["entries"][0]["kernel"]["signature"])), "to another row"),
    "an unknown trait": (manifest(lambda m: m["entries"][0]["kernel"]["signature"].update(mask="m")), "mask"),
    "another row": (first("artifact", kernel_id="0" * 64), "to another row"),
    "an unknown arch": (first("artifact", arch="gfx1"), "to another row"),
    "another ISA": (first("artifact", isa="x86-64-v9"), "'x86-64-v9' is not the ISA of"),
    "an ISA that this CPU does not run": (foreign, f"{FOREIGN} needs a CPU of family"),
    "a failed build": (first("artifact", status="failed"), "not that of a successful build"),
    "a flawed library": (lambda m: m.update({library(m): b"x" * len(m[library(m)])}), "differs from the manifest"),
    "a larger library": (lambda m: m.update({library(m): m[library(m)] + b"x"}), "bytes, not"),
    "a huge library": (first("artifact", so_bytes=2**40), "so_bytes: must be at most"),
    "an empty library": (first("artifact", so_bytes=0), "so_bytes: must be above 0"),
    "no library": (lambda m: m.pop(library(m)), "members differ from those of the manifest"),
    "one member more": (lambda m: m.update({"../../evil": b""}), "'../../evil' is not in the manifest"),
    "a library twice": (lambda m: m.update({f"{library(m)}*": m.pop(library(m))}), "members differ"),
    "a key twice": (manifest(lambda m: m["entries"].append(m["entries"][0])), "listed twice"),
    "a key that leads elsewhere": (rename("libraries/../../evil.so"), "key: must match"),
    "an absolute key": (rename("/evil.so"), "key: must match"),
    "a timing of nothing": (manifest(lambda m: m["timings"][0].update(artifact_key="0" * 64)), "to no library"),
    "a timing of tomorrow": (manifest(lambda m: m["timings"][0].update(created=AHEAD)), "a date in the future"),
    "a build of tomorrow": (first("artifact", created=AHEAD), "built in the future"),
    "a time below zero": (manifest(lambda m: m["timings"][0].update(min_ms=-1)), "min_ms: must be at least"),
    "times in no order": (manifest(lambda m: m["timings"][0].update(p10_ms=3.0)), "not in order"),
    "a log without end": (first("artifact", log="x" * 10**6), "log: must have at most"),
    "a timing of no problem": (manifest(lambda m: m["timings"][0].update(problem='{"op":"x"}')), "not the key of"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_bundle_is_refused_whole(name: str, shipped: Shipped, here: Catalog, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    repack(shipped.path, tmp_path / "changed.bundle", change)
    with pytest.raises(BundleError, match=message):
        import_bundle(here, tmp_path / "changed.bundle", trust=True)
    assert_nothing_written(here)
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.slow
def test_libraries_of_gpus_are_stored_on_any_machine(
    shipped: Shipped, copied: Catalog, here: Catalog, tmp_path: Path
) -> None:
    kernel = copied.kernels("1", limit=1)[0]

    def change(found: dict[str, Any]) -> None:
        entry = found["entries"][0]
        entry |= {"kernel": json.loads(kernel.canonical_json), "name": kernel.name}
        entry["artifact"] |= {"arch": "gfx950", "isa": "gfx950", "kernel_id": kernel.id}

    repack(shipped.path, tmp_path / "gpu.bundle", manifest(change))
    for catalog, new in ((copied, 3), (here, 0)):
        done = import_bundle(catalog, tmp_path / "gpu.bundle", trust=True)
        assert (done.new, done.no_rows) == (new, 0)
        assert [row.id for row in catalog.kernels("built", arch="gfx950")] == [kernel.id]


def test_kernels_of_a_checkout_that_was_not_adopted_here_are_refused_with_the_command(
    shipped: Shipped, here: Catalog, tmp_path: Path
) -> None:
    def change(found: dict[str, Any]) -> None:
        entry = found["entries"][0]
        kernel = read_kernel(entry["kernel"] | {"revision": "my-ck", "base": "native"})
        entry["kernel"] = json.loads(kernel.model_dump_json())
        entry["artifact"]["kernel_id"] = kernel.id

    repack(shipped.path, tmp_path / "adopted.bundle", manifest(change))
    with pytest.raises(BundleError, match="has no revision 'my-ck'") as error:
        import_bundle(here, tmp_path / "adopted.bundle", trust=True)
    adopts = f"catalog populate --ck-root CHECKOUT --arch {shipped.plans[0].arch} --label my-ck --mask-impl generic"
    assert error.value.hint == f"Adopt the same checkout first: {adopts}"
    assert_nothing_written(here)


# All or nothing


def test_when_the_last_record_cannot_be_written_nothing_stays(shipped: Shipped, here: Catalog) -> None:
    blocked = settings().cache_dir / f"{shipped.keys[-1]}.json"
    Cache(settings().cache_dir).create()
    blocked.mkdir()
    with pytest.raises(BundleError, match="Is a directory"):
        import_bundle(here, shipped.path, trust=True)
    assert_nothing_written(here)
    assert import_bundle(here, shipped.path, trust=True).new == 3


def _kill_at_rename(count: int, catalog: Catalog, path: Path) -> None:
    renames = iter(range(count))
    rename_file = os.rename

    def rename(source: str, target: str) -> None:
        if next(renames, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        rename_file(source, target)

    os.replace = rename
    import_bundle(catalog, path, trust=True)


@pytest.mark.parametrize("renames", [0, 2, 3, 5])
def test_killed_between_renames(renames: int, shipped: Shipped, here: Catalog) -> None:
    """Three libraries come first, then three records: what is half there is no entry."""
    child = multiprocessing.get_context("fork").Process(target=_kill_at_rename, args=(renames, here, shipped.path))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    cache = Cache(settings().cache_dir)
    entries = [key for key in shipped.keys if cache.load(key) is not None]
    assert len(entries) == max(0, renames - 3)
    assert contents(here) == [[], []]
    assert import_bundle(here, shipped.path, trust=True).new == 3 - len(entries)
    assert contents(here) == contents(shipped.source)
    assert list((settings().cache_dir / "tmp").iterdir()) == []


def test_when_the_catalog_cannot_be_written_nothing_stays(shipped: Shipped, here: Catalog) -> None:
    here.connection.execute("PRAGMA query_only = ON")
    with pytest.raises(RegistryError):
        import_bundle(here, shipped.path, trust=True)
    assert_nothing_written(here)


def test_a_cache_that_strangers_can_reach_is_not_exported(shipped: Shipped, here: Catalog, tmp_path: Path) -> None:
    import_bundle(here, shipped.path, trust=True)
    settings().cache_dir.chmod(0o770)
    require_private.cache_clear()  # a new process, as it were
    with pytest.raises(CacheError, match="is open to others"):
        export_bundle(here, "", tmp_path / "out.bundle")
    assert not (tmp_path / "out.bundle").exists()


def test_the_command_line(shipped: Shipped, here: Catalog, tmp_path: Path) -> None:
    def cli(*words: str) -> subprocess.CompletedProcess[str]:
        return command.catalog("cache", *words, db=here.path)

    distrusted = cli("import", str(shipped.path))
    assert (distrusted.returncode, "are code" in distrusted.stderr, "--trust" in distrusted.stderr) == (2, True, True)
    assert_nothing_written(here)
    assert "3 libraries are new" in cli("import", "--trust", str(shipped.path)).stdout
    assert "3 libraries and 3 timings" in cli("export", "--where", "built", str(tmp_path / "again.bundle")).stdout
    damaged = cli("import", "--trust", str(here.path))
    assert (damaged.returncode, "Traceback" in damaged.stderr) == (1, False)


@pytest.mark.slow
def test_a_size_limit_keeps_what_is_used_most(
    shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(shipped.path.parent / "cache"))
    trace, bundle = tmp_path / "calls.jsonl", tmp_path / "small.bundle"
    line = {"format": 1, "at": 1.0, "pid": 1, "call": "run", "launches": 1, "arch": "host", "revision": "native"}
    line |= {"mask_impl": "generic", "device": "a CPU", "cores": 1, "kernels": ["one"]}
    calls = [(PROBLEM, 50.0)] + [(DECODE, 1.0)] * 9
    trace.write_text("".join(json.dumps(line | {"ms": ms, "problem": of.key_fields()}) + "\n" for of, ms in calls))

    def export(*words: object) -> subprocess.CompletedProcess[str]:
        return command.catalog("cache", "export", "--trace", trace, *words, bundle, db=shipped.source.path)

    assert "They serve 100.0% of the calls" in export().stdout
    whole = bundle.stat().st_size
    limited = export("--max-size", whole - 1, "--by", "calls")
    assert limited.stdout.startswith("2 libraries and 2 timings"), "split keys, and their combination"
    assert "They serve 90.0% of the calls" in limited.stdout
    assert bundle.stat().st_size < whole
    by_time = export("--max-size", whole - 1, "--by", "time")
    assert by_time.stdout.startswith("1 library and 1 timing")
    assert "They serve 84.7% of the time" in by_time.stdout
    assert export("--max-size", "1K").returncode == 2
    assert command.catalog("cache", "export", "--max-size", "1M", bundle, db=shipped.source.path).returncode == 2
