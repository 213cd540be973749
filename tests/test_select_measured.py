"""Selection by measurements: the fastest kernel of the problem or of its nearest one, and what is remembered of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import command
import pytest
from conftest import copy_of, slow_but
from test_select import problem

from catalog.backends import why_unavailable
from catalog.build.first_runs import Quarantine
from catalog.errors import SelectionError
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import MAIN_STAGE, stages_of
from catalog.ops.conv.problem import ConvProblem
from catalog.registry.timings import Measured, Timing, nearest, record
from catalog.registry.transactions import transaction
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.measure import summarise
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import Wanted
from catalog.schema.policy import GRAPH, Policy
from catalog.schema.problem import Problem as AnyProblem
from catalog.settings import settings

GPU = DeviceInfo("gfx950", "AMD Instinct MI355X", 256)


def record_timings(
    catalog: Catalog,
    asked: AnyProblem,
    medians: dict[str, float],
    library: str = "",
    stamp: str = "",
    *,
    device: DeviceInfo = GPU,
    policy: Policy = GRAPH,
) -> None:
    """As a tuning would: a library and a measurement of each kernel."""
    rows = [(kernel_id, device.arch, kernel_id + library) for kernel_id in medians]
    catalog.connection.executemany(
        "INSERT OR IGNORE INTO artifact (key, kernel_id, arch, toolchain, isa, flags, status, log, compile_s, created) "
        "VALUES (?3, ?1, ?2, '', '', '', 'built', '', 0, '')",
        rows,
    )
    measured = {id: summarise([round(ms * 1e6)] * 9) for id, ms in medians.items()}
    timings = [Timing(id, id + library, replace(one, **policy._asdict())) for id, one in measured.items()]
    with transaction(catalog.connection):
        record(catalog.connection, asked, device, timings, stamp=stamp)


def test_selection_asks_for_the_policy_in_force(copied: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of one kernel under several policies stand beside each other."""
    asked = problem()
    one, other = (found.kernel.id for found in copied.candidates(asked, arch="gfx950", limit=2, static=True))
    policies = {Policy("graph"): {one: 1.0, other: 2.0}, Policy("eager"): {one: 4.0, other: 3.0}}
    policies[Policy("eager", cold=True)] = {one: 5.0, other: 6.0}
    for policy, medians in policies.items():
        record_timings(copied, asked, medians, policy=policy)
    for policy, medians in policies.items():
        monkeypatch.setenv("CATALOG_MEASURED_AS", policy.measured_as)
        monkeypatch.setenv("CATALOG_MEASURED_COLD", str(policy.cold))
        settings.cache_clear()
        choice = copied.choice(asked, arch="gfx950")
        assert (choice.policy, choice.evidence) == (policy, "measured")
        assert {found.kernel.id: found.median_ms for found in choice.candidates if found.median_ms} == medians
        assert copied.select(asked, arch="gfx950").kernels[0].id == min(medians, key=medians.__getitem__)
    monkeypatch.setenv("CATALOG_MEASURED_AS", "graph")
    settings.cache_clear()
    assert copied.choice(asked, arch="gfx950").about == (
        "Static order: nothing of this problem's kind was measured on this device as graph, cold caches."
    )
    copied.select(asked, arch="gfx950")
    assert [key for key, _ in copied.misses("gfx950")] == [asked.key], "a miss is one of the policy in force"
    assert not copied.misses("gfx950", Policy("graph"))


def test_a_measured_kernel_comes_before_the_static_order(copied: Catalog) -> None:
    asked, other = problem(), problem(batch=9)
    first = copied.select(asked, arch="gfx950")
    static = [candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=5)]
    assert static[0] == first.kernels[0].id
    assert copied.choice(asked, arch="gfx950").evidence == "static"
    record_timings(copied, asked, {static[3]: 2.0, static[2]: 3.0})
    measured = copied.candidates(asked, arch="gfx950", limit=5)
    assert [candidate.kernel.id for candidate in measured] == [static[i] for i in (3, 2, 0, 1, 4)]
    assert [candidate.median_ms for candidate in measured] == [2.0, 3.0, None, None, None]
    assert copied.choice(asked, arch="gfx950").evidence == "measured"
    assert copied.choice(other, arch="gfx950").candidates[0] == measured[0]
    assert copied.choice(other, arch="gfx950").evidence == "nearest"
    assert copied.choice(problem(lse=True), arch="gfx950").evidence == "static", "of another kind"


def test_the_nearest_measured_problem_decides(copied: Catalog) -> None:
    asked = problem(seqlen_q=700)
    ids = sorted(candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=3))
    record_timings(copied, problem(seqlen_q=512), {ids[0]: 1.0, ids[1]: 2.0})
    record_timings(copied, problem(seqlen_q=4096), {ids[0]: 2.0, ids[1]: 1.0})
    choice = copied.choice(asked, arch="gfx950")
    assert choice.candidates[0].kernel.id == ids[0]
    assert choice.neighbour is not None
    assert choice.neighbour.key == problem(seqlen_q=512).key
    assert copied.choice(problem(seqlen_q=3000), arch="gfx950").candidates[0].kernel.id == ids[1]


def test_medians_within_noise_are_equal_and_the_id_decides(copied: Catalog) -> None:
    asked = problem()
    ids = sorted(candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=3))
    record_timings(copied, asked, {ids[0]: 1.005, ids[1]: 1.0, ids[2]: 1.1})
    found = copied.candidates(asked, arch="gfx950", limit=3)
    assert [candidate.kernel.id for candidate in found] == ids


def test_a_timing_whose_launches_disagree_is_no_evidence(copied: Catalog) -> None:
    """As older versions recorded on a busy machine, and as other machines' catalogs bring it."""
    asked = problem()
    first, second = (found.kernel.id for found in copied.candidates(asked, arch="gfx950", limit=2))
    record_timings(copied, asked, {first: 1.0, second: 2.0})
    copied.connection.execute("UPDATE timing SET high_ms = 54 WHERE kernel_id = ?", (first,))
    choice = copied.choice(asked, arch="gfx950", limit=2)
    assert [(c.kernel.id, c.median_ms) for c in choice.candidates] == [(second, 2.0), (first, None)]
    copied.connection.execute("UPDATE timing SET high_ms = 54")
    assert copied.choice(asked, arch="gfx950").evidence == "static"


def test_of_several_libraries_of_a_row_the_one_measured_last_counts(copied: Catalog) -> None:
    asked = problem()
    first, second = sorted(candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=2))
    record_timings(copied, asked, {first: 1.0, second: 2.0}, "old", "2026-01-01T00:00:00+00:00")
    record_timings(copied, asked, {first: 3.0}, "new", "2026-01-02T00:00:00+00:00")
    choice = copied.choice(asked, arch="gfx950", limit=2)
    assert [(c.kernel.id, c.median_ms) for c in choice.candidates] == [(second, 2.0), (first, 3.0)]
    about, *lines = str(choice).splitlines()
    assert about == "Measured: 2 of these kernels were timed on this very problem."
    assert [line.split()[:2] for line in lines] == [["2", "ms"], ["3", "ms"]]


def test_a_choice_is_remembered_until_the_catalog_changes(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db")
    asked = ConvProblem(n=2, c=64, k=64, size=(20, 20), filter=(3, 3), dtype="bf16")
    plan = catalog.select(asked, arch="sm_90")
    assert catalog.select(asked, arch="sm_90") is plan
    catalog.populate("sm_90", operation="conv", force=True)
    again = catalog.select(asked, arch="sm_90")
    assert again is not plan
    assert again.kernels == plan.kernels


GROUPS: dict[str, list[dict[str, Any]]] = {
    "gfx950": [
        {},
        {"mask": "causal", "lse": True, "hdim_q": 72},
        {"packed": True},
        {"op": "splitkv"},
        {"op": "splitkv", "page_size": 16, "packed": True},
        {"op": "pagedkv", "page_size": 16},
        {"op": "appendkv", "seqlen_new": 1},
        {"op": "batch_prefill", "page_size": 16, "packed": True, "nhead_q": 16},
        {"op": "bwd"},
        {"op": "bwd", "packed": True},
    ],
    "gfx1100": [{}, {"hdim_q": 64}, {"op": "splitkv"}],
    "gfx1201": [{}, {"op": "splitkv", "lse": True}],
    "sm_90": [
        {},
        {"nhead_k": 4},
        {"op": "splitkv", "nhead_k": 4},
        {"packed": True},
        {"op": "appendkv", "seqlen_new": 1},
        {"op": "batch_prefill", "page_size": 16, "packed": True},
        {"op": "bwd"},
    ],
    "x86_64_v3": [{"dtype": "fp32", "lse": True}, {"dtype": "fp32", "op": "bwd", "packed": True}],
}
"""Problems by what they have but sizes; ``packed``: sequences of several lengths."""


def resized(draw: random.Random, fields: dict[str, Any]) -> Problem:
    """A problem of these fields, of sizes about which rules may disagree."""

    def length() -> int:
        return draw.choice([draw.randint(1, 300), 64 * draw.randint(1, 160), 64 * draw.randint(1, 160) + 1])

    fields, batch = {"nhead_q": 8, "hdim_q": 128, "dtype": "bf16"} | fields, draw.randint(1, 40)
    if fields.pop("packed", False):
        lengths = tuple(length() for _ in range(min(batch, 3)))
        keys = {"seqlen_k": length()} if fields.get("page_size") else {"seqlens_k": lengths}
        return Problem(seqlens_q=lengths, **keys, **fields)
    return Problem(batch=batch, seqlen_q=draw.choice([1, 1, length()]), seqlen_k=length() + 9000, **fields)


def chosen(select: Callable[[], tuple[Kernel, ...]]) -> list[str] | str:
    try:
        return [kernel.id for kernel in select()]
    except SelectionError as error:
        return str(error)


@pytest.mark.parametrize("count", slow_but([12], [12, 400]))
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("arch", slow_but(["gfx950"], GROUPS))
def test_what_is_remembered_is_what_the_query_would_choose(
    catalog_of: Callable[[str], Catalog], tmp_path: Path, arch: str, measured: bool, count: int
) -> None:
    """For every problem: whatever was decided about others before it must be no other decision than its own."""
    draw = random.Random(count)  # noqa: S311
    catalog = copy_of(catalog_of(arch), tmp_path / "copy.db")
    catalog.select(resized(draw, GROUPS[arch][0]), arch=arch)
    if measured:
        device = catalog.device_info(arch) if why_unavailable(arch) is None else replace(GPU, arch=arch)
        for fields in GROUPS[arch]:
            for asked in (resized(draw, fields) for _ in range(4)):
                ids = [candidate.kernel.id for candidate in catalog.candidates(asked, arch=arch, limit=6)]
                medians = {kernel_id: draw.uniform(1, 2) for kernel_id in ids}
                record_timings(catalog, asked, medians, device=device)
        catalog.forget()
    problems = [resized(draw, fields) for fields in GROUPS[arch] for _ in range(count)]
    for asked in problems:

        def by_query(asked: Problem = asked) -> tuple[Kernel, ...]:
            main = MAIN_STAGE[asked.op]
            best = catalog.candidates(asked, arch=arch, limit=1)[0].kernel
            stages = [family for family in stages_of(asked.op, best) if family is not main]
            others = {
                family: catalog.candidates(asked, arch=arch, family=family, limit=1, static=True)[0].kernel
                for family in stages
            }
            return tuple((others | {main: best})[family] for family in stages_of(asked.op, best))

        assert chosen(lambda asked=asked: catalog.select(asked, arch=arch).kernels) == chosen(by_query)
    if not measured:
        made = catalog._planners.of(Wanted(arch)).decisions._made
        assert len(made) <= len(problems) / (1.5 if count < 100 else 8), "most decisions are remembered ones"


def device_of(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, device: DeviceInfo) -> None:
    """Make ``device`` the one of this machine that runs its arch."""
    monkeypatch.setattr("catalog.runtime.planner.why_unavailable", lambda arch: None)
    monkeypatch.setattr(catalog._devices, "info", lambda arch: device)
    catalog.forget()


def test_a_device_without_timings_selects_from_those_of_its_nearest_sibling(
    copied: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """304 units are nearer to 80 than 608 are; one timing of this device outweighs all of its siblings'."""
    asked, here = problem(), replace(GPU, cores=80)
    static = [candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=4, static=True)]
    record_timings(copied, asked, {static[3]: 1.0, static[2]: 2.0}, device=replace(GPU, cores=304))
    record_timings(copied, asked, {static[2]: 1.0, static[3]: 2.0}, device=replace(GPU, cores=608))
    device_of(copied, monkeypatch, here)
    choice = copied.choice(asked, arch="gfx950", limit=4)
    assert [candidate.kernel.id for candidate in choice.candidates] == [static[i] for i in (3, 2, 0, 1)]
    assert choice.evidence == "sibling"
    assert choice.about == (
        "Sibling: on gfx950 with 304 units, the nearest measured sibling of gfx950 with 80 units, "
        "2 of these kernels were timed on this very problem."
    )
    assert copied.select(asked, arch="gfx950").kernels[0].id == static[3]
    assert copied.choice(problem(batch=9), arch="gfx950").evidence == "sibling", "from a near problem"
    record_timings(copied, asked, {static[1]: 9.0}, device=here)
    copied.forget()
    assert copied.choice(asked, arch="gfx950").evidence == "measured"
    assert copied.select(asked, arch="gfx950").kernels[0].id == static[1]
    assert copied.choice(problem(lse=True), arch="gfx950").evidence == "static", "no device measured this kind"


@pytest.mark.parametrize(("clock", "nearest"), [(1100, 0), (1900, 1)])
def test_of_siblings_with_equal_units_the_one_with_the_nearest_clock_counts(
    copied: Catalog, monkeypatch: pytest.MonkeyPatch, clock: float, nearest: int
) -> None:
    asked, of_another_kind, here = problem(), problem(lse=True), replace(GPU, name="this one")
    ids = [candidate.kernel.id for candidate in copied.candidates(asked, arch="gfx950", limit=2)]
    record_timings(
        copied, of_another_kind, {copied.select(of_another_kind, arch="gfx950").kernels[0].id: 1.0}, device=here
    )
    for name, kernel, mhz in (("slow", ids[0], 1000), ("fast", ids[1], 2000)):
        record_timings(copied, asked, {kernel: 1.0}, device=replace(GPU, name=name))
        copied.connection.execute("UPDATE timing SET clock_mhz = ? WHERE kernel_id = ?", (mhz, kernel))
    copied.connection.execute("UPDATE timing SET clock_mhz = ? WHERE clock_mhz IS NULL", (clock,))
    device_of(copied, monkeypatch, here)
    assert copied.choice(asked, arch="gfx950").candidates[0].kernel.id == ids[nearest]


@pytest.mark.slow
def test_without_timings_of_its_arch_the_nearest_arch_of_the_family_counts(copied: Catalog) -> None:
    """gfx942 is one generation from gfx950, gfx90a two, and gfx1100 is of another family. Kernels match by traits."""
    asked = problem(hdim_q=256)
    timed = {}
    for arch in ("gfx1100", "gfx90a", "gfx942"):
        copied.populate(arch, receipts=(0,))
        timed[arch] = copied.candidates(asked, arch=arch, limit=3, static=True)[-1].kernel
        record_timings(copied, asked, {timed[arch].id: 1.0}, device=replace(GPU, arch=arch, name=arch))
    choice = copied.choice(asked, arch="gfx950")
    assert choice.about.startswith("Sibling: on gfx942 with 256 units, the nearest measured sibling of gfx950 with 256")
    best = choice.candidates[0]
    assert (best.kernel.signature, best.kernel.algorithm) == (timed["gfx942"].signature, timed["gfx942"].algorithm)
    assert best.median_ms == 1.0
    words = ("explain", "--batch", 8, "--nhead-q", 32, "--seqlen-q", 2048, "--hdim-q", 256, "--dtype", "bf16")
    shown = command.catalog(*words, "--arch", "gfx950", db=copied.path).stdout
    assert shown.startswith("Sibling: on gfx942 with 256 units")


def test_the_nearest_problem_in_memory_is_the_one_of_the_query(copied: Catalog) -> None:
    draw = random.Random(1)  # noqa: S311
    ids = [candidate.kernel.id for candidate in copied.candidates(problem(), arch="gfx950", limit=1)]
    known = [problem(batch=draw.randint(1, 9), seqlen_q=draw.randint(1, 99), seqlen_k=64) for _ in range(60)]
    for asked in [*known, problem(seqlen_q=700, scale=0.5), problem(seqlen_q=700)]:
        record_timings(copied, asked, {ids[0]: 1.0})
    device = copied.measured_on("gfx950")
    there = Measured.of_kind(copied.connection, problem().form.kind, device, GRAPH)
    assert there is not None
    sizes = [(draw.randint(1, 9), draw.randint(1, 99), draw.randint(1, 128)) for _ in range(500)]
    asked = [problem(batch=batch, seqlen_q=q, seqlen_k=k) for batch, q, k in sizes]
    for one in [*known, *asked, problem(seqlen_q=700), problem(seqlen_q=700, scale=0.5)]:
        expected = nearest(copied.connection, one, device, GRAPH)
        assert expected is not None
        assert there.nearest(one) == (expected.id, expected.same)
    assert Measured.of_kind(copied.connection, problem(lse=True).form.kind, device, GRAPH) is None


def test_what_has_failed_is_not_remembered(copied: Catalog) -> None:
    """A kernel that is quarantined here is nobody's any more, whatever was decided before."""
    first = copied.select(problem(), arch="gfx950").kernels[0]
    key = "e" * 64
    record_timings(copied, problem(lse=True), {first.id: 1.0}, key)  # with the library that is quarantined
    fields = {"key": key, "kernel_id": first.id, "kernel": first.name, "arch": "gfx950", "device": "gfx950"}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    copied.build_log.quarantine(Quarantine(**fields, reason="hung", problem=problem().key, when=now))
    assert copied.select(problem(batch=3), arch="gfx950").kernels[0] != first
