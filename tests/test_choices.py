"""Frozen choices: selection from one file, the same in every process, without a catalog or a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from conftest import fill
from rough import give_up_privileges, in_child, unwritable
from test_select_measured import record_timings

from catalog.build.cache import Cache
from catalog.errors import ChoicesError
from catalog.ops.attention.problem import Problem
from catalog.runtime.catalog import Catalog
from catalog.runtime.choices import freeze, read_choices
from catalog.runtime.demand import Demand
from catalog.runtime.inputs import make_inputs
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Wanted
from catalog.settings import settings

SMALL = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32")
LONGER = Problem(batch=3, nhead_q=2, seqlen_q=70, hdim_q=32, dtype="fp32")
CAUSAL = Problem(batch=1, nhead_q=2, seqlen_q=33, hdim_q=32, dtype="fp32", mask="causal")
NOWHERE = Path("/proc/no/catalog.db")
"""Where not even root can make a file."""


@dataclass(frozen=True)
class Place:
    """A cache with the kernels of :data:`SMALL`, a file of choices for it, and its outputs."""

    kernels: tuple[Kernel, ...]
    cache: Cache
    lock: Path
    outputs: Mapping[str, Any]

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the file of choices."""
        content = json.loads(self.lock.read_text())
        change(content)
        self.lock.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def frozen(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """What the tests copy."""
    folder = tmp_path_factory.mktemp("frozen")
    path = shutil.copy(host_file, tmp_path_factory.mktemp("thawed") / "catalog.db")
    with pytest.MonkeyPatch.context() as patch, Catalog(path) as catalog:
        kernels = catalog.select(SMALL).kernels
        cache = Cache(fill(folder / "cache", kernels))
        patch.setenv("CATALOG_CACHE_DIR", str(cache.folder))
        settings.cache_clear()
        with Catalog(path) as of_cache:
            demand = Demand("a test", ((SMALL, Wanted("host")),))
            freeze(of_cache, demand.answers(of_cache), folder / "choices.lock")
            outputs = of_cache.select(SMALL).run(make_inputs(SMALL)).outputs
    settings.cache_clear()
    return Place(kernels, cache, folder / "choices.lock", outputs)


@pytest.fixture
def place(frozen: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    image = tmp_path / "image"
    shutil.copytree(frozen.lock.parent, image)
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(image / "cache"))
    monkeypatch.setenv("CATALOG_CHOICES", str(image / "choices.lock"))
    settings.cache_clear()
    yield replace(frozen, cache=Cache(image / "cache"), lock=image / "choices.lock")
    settings.cache_clear()


def test_the_file_alone_decides_and_nothing_is_written(place: Place) -> None:
    with Catalog(NOWHERE) as catalog:
        plan = catalog.select(SMALL)
        assert plan.kernels == place.kernels
        assert np.array_equal(plan.run(make_inputs(SMALL)).outputs["o"], place.outputs["o"])
        assert catalog.select(LONGER).kernels == place.kernels, "the rules say the same about its sizes"
        assert not catalog.builds.may_compile
        with pytest.raises(ChoicesError, match=r"has no choice for the problem .*top_left"):
            catalog.select(CAUSAL)
    assert not NOWHERE.exists()


def test_a_read_only_image_serves_it(place: Place) -> None:
    def outputs() -> Any:
        give_up_privileges()
        return Catalog(NOWHERE).select(SMALL).run(make_inputs(SMALL)).outputs["o"]

    with unwritable(place.lock.parent):
        assert np.array_equal(in_child(outputs), place.outputs["o"])


def test_a_remote_cache_has_the_libraries_that_the_cache_lacks(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("CATALOG_REMOTE", f"file://{tmp_path}/remote")
    assert command.catalog("cache", "push").returncode == 0
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(tmp_path / "empty"))
    settings.cache_clear()
    with Catalog(NOWHERE) as catalog:
        plan = catalog.select(SMALL)
        assert np.array_equal(plan.run(make_inputs(SMALL)).outputs["o"], place.outputs["o"])
    assert Cache(tmp_path / "empty").keys() == place.cache.keys()


def test_the_command_line_uses_it_too(place: Place) -> None:
    problem = ("--batch", 1, "--nhead-q", 2, "--seqlen-q", 33, "--hdim-q", 32, "--dtype", "fp32")
    shown = command.catalog("select", *problem, "--format", "json", db=NOWHERE)
    assert [row["id"] for row in json.loads(shown.stdout)] == [kernel.id for kernel in place.kernels]
    ran = command.catalog("run", *problem, "--validate", db=NOWHERE)
    assert ran.returncode == 0, ran.stderr
    assert command.catalog("check", "--choices", place.lock).returncode == 0


def _remove(place: Place) -> None:
    place.cache.remove(*place.cache.keys())


def _freeze_elsewhere(place: Place) -> None:
    place.change(lambda content: content["libraries"][0].update(key="0" * 64))


def _freeze_before(place: Place) -> None:
    place.change(lambda content: content["libraries"][0].update(abi=1))


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_remove, "frozen as library .*, absent from the cache .*, which has no library of this kernel"),
        (_freeze_elsewhere, "frozen as library 0{64}, absent from the cache .*, which has [0-9a-f]{64} instead"),
        (_freeze_before, "frozen with ABI 1, this version has ABI"),
    ],
)
def test_a_stale_choice_is_an_error_that_names_it(spoil: Callable[[Place], None], fault: str, place: Place) -> None:
    spoil(place)
    with pytest.raises(ChoicesError, match=f"choices.lock: kernel {place.kernels[0].name}: {fault}"):
        Catalog(NOWHERE).select(SMALL)
    checked = command.catalog("check", "--choices", place.lock, "--format", "json")
    assert checked.returncode == 1
    assert [row["id"] for row in json.loads(checked.stdout)] == [place.kernels[0].id]


def test_a_damaged_library_is_noticed_before_it_is_loaded(place: Place) -> None:
    plan = Catalog(NOWHERE).select(SMALL)
    place.cache.so_path(*place.cache.keys()).write_bytes(b"no library")
    with pytest.raises(ChoicesError, match="its library is damaged"):
        plan.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=2), "has format 2; this version knows 1"),
        (lambda content: content.pop("forms"), "forms: missing|forms: "),
        (lambda content: content["forms"][0]["choices"][0].update(stages=[7]), "names a library that is not listed"),
        (lambda content: content["forms"][0]["choices"][0]["problem"].update(head=1), "no field 'head'"),
        (lambda content: content["forms"][0].update(asking="SELECT nonsense"), "no such column: nonsense"),
    ],
)
def test_a_file_that_is_not_one_of_choices_says_so(
    change: Callable[[dict[str, Any]], None], message: str, place: Place
) -> None:
    place.change(change)
    with pytest.raises(ChoicesError, match=message):
        Catalog(NOWHERE).select(SMALL)


def test_only_what_is_built_can_be_frozen_and_equal_choices_make_equal_files(
    place: Place, host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CATALOG_CHOICES")
    db = shutil.copy(host_file, tmp_path / "catalog.db")
    shapes = tmp_path / "shapes.yaml"
    grid = "  - {name: one, category: prefill, fixed: {batch: 1, nhead_q: 2, seqlen_q: 33, hdim_q: 32, dtype: fp32}}"
    shapes.write_text(f"about: one\ngrids:\n{grid}\n")
    again = tmp_path / "again.lock"
    done = command.catalog("freeze", "--shapes", shapes, "-o", again, db=db)
    assert done.stdout == f"1 problem and 1 library -> {again}\n", done.stderr
    assert again.read_text() == place.lock.read_text()
    assert len(read_choices(again).libraries) == 1

    shapes.write_text(f"about: one\ngrids:\n{grid.replace('dtype: fp32', 'dtype: fp32, mask: causal')}\n")
    refused = command.catalog("freeze", "--shapes", shapes, "-o", tmp_path / "no.lock", db=db)
    assert refused.returncode == 1
    assert "kernels that are not built cannot be frozen:\n    fmha_fwd_d32_fp32" in refused.stderr
    assert not (tmp_path / "no.lock").exists()


RUN = """\
import hashlib, json, sys
from catalog import Catalog, Problem
plan = Catalog(sys.argv[1]).select(Problem(**json.loads(sys.argv[2])))
bound = plan.bind(seed=5)
digests = set()
for _ in range(100):
    bound.launch()
    digests.add(hashlib.sha256(bound.outputs["o"].tobytes()).hexdigest())
print(json.dumps([plan.kernels[0].id, *sorted(digests)]))
"""


@pytest.mark.slow
def test_eight_processes_with_eight_timing_tables_give_equal_bits(
    place: Place, host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CATALOG_CHOICES")
    settings.cache_clear()
    files = []
    for rank in range(8):
        catalog = Catalog(shutil.copy(host_file, tmp_path / f"rank{rank}.db"))
        ids = [candidate.kernel.id for candidate in catalog.candidates(SMALL, static=True, limit=8)]
        medians = {kernel_id: 2.0 + place for place, kernel_id in enumerate(ids)} | {ids[rank % len(ids)]: 1.0}
        record_timings(catalog, SMALL, medians, device=catalog.device_info("host"))
        catalog.close()
        files.append(catalog.path)
    assert len({Catalog(file).select(SMALL).kernels for file in files}) > 1, "their timings disagree"

    environment = os.environ | {"CATALOG_CHOICES": str(place.lock)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(file), SMALL.key], env=environment, stdout=subprocess.PIPE, text=True
        )
        for file in files
    ]
    answers = {rank.communicate(timeout=120)[0] for rank in ranks}
    [answer] = answers
    assert json.loads(answer)[0] == place.kernels[0].id
    assert len(json.loads(answer)) == 2, "one digest"
