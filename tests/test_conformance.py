"""The conformance kit: what it says of archs that conform, and of ones that do not; and its page, to the letter."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace

import command
import pytest
from conftest import slow_but
from pages import ROOT, blocks_of
from test_schema import edit

from catalog.build import targets
from catalog.build.toolchains import find_host_toolchain
from catalog.conformance.check import ConformanceOptions, asked_archs, check_arch
from catalog.conformance.findings import Verdict
from catalog.conformance.kernels import STEPS, kernel_findings
from catalog.errors import DeviceError, SpecError
from catalog.ops.attention.kernel import AttentionKernel
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host.device import why_unavailable
from catalog.schema.kernel import canonical_json_sql

SPEC = next(block.text for block in blocks_of(ROOT / "docs" / "how-to" / "add-an-arch.md") if block.title)
TOOLCHAIN = {"isa": "x86-64-v3", "compile": ["-march=x86-64-v3"], "cpu": "x86_64_v3"}
ARCH = "my_cpu"

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the page's arch is an x86_64 CPU")


TWIN = {"id": "twin", "dtype": ["fp32"], "traits": {"pad_s": 1, "pad_dv": 1, "tile_tag": "not in names"}}


def add_the_arch(data):
    """What the page says to write."""
    (data / "arch_specs" / "native" / f"{ARCH}.json").write_text(SPEC)
    facts = data / "toolchains" / "host.json"
    content = json.loads(facts.read_text())
    content["arches"][ARCH] = TOOLCHAIN
    facts.unlink()
    facts.write_text(json.dumps(content))


@pytest.fixture
def spec(specs):
    """The spec of the page's arch, to change."""
    toolchains = specs / "toolchains"
    source = toolchains.resolve()
    toolchains.unlink()
    shutil.copytree(source, toolchains)
    add_the_arch(specs)
    return specs / "arch_specs" / "native" / f"{ARCH}.json"


def rows_of():
    return check_arch(ConformanceOptions(ARCH, build=False))


def failures(report):
    return [(f.check, f.subject, f.about) for f in report.findings if f.verdict is Verdict.FAILED]


NONCONFORMING = [
    (("arch", "your_cpu"), "spec", "your_cpu", "differs from the file's name, 'my_cpu'"),
    (("enumerations", "fwd", "tiles", [{}]), "spec", ARCH, "enumerations.fwd.tiles[0].tiles: missing"),
    (
        ("enumerations", "fwd", "constraints", [["idle", "tile_m0 < 999"]]),
        "constraint reachable",
        "fwd: idle",
        "rejects nothing, masks generic; stated in my_cpu.json",
    ),
    (
        ("enumerations", "fwd_appendkv", "constraints", [["all", "hdim_q < 0"]]),
        "rows",
        "fwd_appendkv",
        "0 rows",
    ),
    (("enumerations", "fwd_appendkv", "receipts", {"7": "1"}), "spec", ARCH, "fwd_appendkv.receipts.7: no receipt"),
    (("receipts", [{"receipt": 7, "names": [], "about": "x"}]), "spec", ARCH, "fwd.receipts: receipt 7 is missing"),
    (
        ("select", {"fwd": {"rules": [["odd", "1 = 1"]]}}),
        "rules name columns",
        "select.fwd: odd",
        "names no column",
    ),
    (("hw_rules", [["odd", "1"]]), "rules name columns", "hw_rules: odd", "names no column"),
    (("select", {"fwd": {"order": ["abs(1)"]}}), "rules name columns", "select.fwd.order", "names no column"),
    (
        ("enumerations", "bwd_dot_do_o", "variants", [TWIN]),
        "rows",
        ARCH,
        "makes the same kernel twice",
    ),
]


@pytest.mark.parametrize(
    ("change", "check", "subject", "message"),
    slow_but(NONCONFORMING[:2], NONCONFORMING),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_conform_is_reported(spec, change, check, subject, message):
    *place, value = change
    edit(spec, *place, value=_rules(value))
    report = rows_of()
    assert not report.conforms
    assert "DOES NOT CONFORM" in report.summary
    found = [about for *what, about in failures(report) if what == [check, subject]]
    assert found, failures(report)
    assert message in found[0]


def _rules(value):
    """Rules are written as [id, expr] above."""
    if isinstance(value, dict):
        return {name: _rules(item) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [{"id": name, "expr": expr, "reason": "a test", "source": "here"} for name, expr in value]
    return value


@pytest.mark.slow
def test_inherited_rules_without_work_are_noted_and_do_not_count(spec):
    edit(spec, "enumerations", "fwd", "tiles", 0, "dtype", value=["fp32", "fp16", "bf16"])
    report = rows_of()
    noted = {finding.subject for finding in report.findings if finding.verdict is Verdict.NOTED}
    assert "fwd_quantised: padded" in noted
    assert report.conforms


@pytest.mark.slow
@pytest.mark.usefixtures("spec")
def test_a_row_with_another_id_is_reported(monkeypatch):
    other = f"{canonical_json_sql(AttentionKernel)} || ' '"
    monkeypatch.setattr("catalog.rules.enumeration.canonical_json_sql", lambda *given: other)
    assert [check for check, *_ in failures(rows_of())] == ["ids round trip"]


@pytest.fixture
def appendkv(spec, tmp_path):
    """Finds what there is to say of the kernels of one family."""
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.populate(ARCH)
    whole = catalog.spec(ARCH)
    alone = whole.model_copy(update={"enumerations": {"fwd_appendkv": whole.enumerations["fwd_appendkv"]}})
    return lambda: {finding.check: finding for finding in kernel_findings(catalog, alone, None)}


def broken_source(kernel, memory):
    return "#error broken\n"


def broken_launch(*_):
    raise DeviceError("it burns")


@on_x86
@pytest.mark.parametrize(
    ("patch", "step", "message"),
    [
        (("catalog.build.targets.HOST", replace(targets.HOST, emit=broken_source)), "built", "does not compile"),
        (
            ("catalog.conformance.kernels.describe", lambda kernel: f"not {kernel.id}"),
            "described",
            "does not describe its",
        ),
        (("catalog.runtime.devices.host.device.start", broken_launch), "run", "it burns"),
        (("catalog.runtime.tolerance.Tolerance.used", lambda *_: 2.0), "verified", "200.0% of the tolerance"),
    ],
    ids=["built", "described", "run", "verified"],
)
def test_a_kernel_that_fails_at_a_step_is_reported_and_later_steps_are_skipped(
    appendkv, monkeypatch, patch, step, message
):
    monkeypatch.setattr(*patch)
    found = appendkv()
    assert found[step].verdict is Verdict.FAILED
    assert message in found[step].about
    before, after = STEPS[: STEPS.index(step)], STEPS[STEPS.index(step) + 1 :]
    assert all(found[name].verdict is Verdict.PASSED for name in before)
    assert all(found[name].verdict is Verdict.SKIPPED for name in after)


@pytest.fixture
def lacking(spec):
    """The arch with a CPU that this machine has not, and a flag that no compiler knows."""
    facts = spec.parent.parent.parent / "toolchains" / "host.json"
    edit(facts, "arches", ARCH, "cpu", value="power10le")
    edit(facts, "arches", ARCH, "compile", value=["-march=none"])
    find_host_toolchain.cache_clear()
    yield
    find_host_toolchain.cache_clear()


@pytest.mark.usefixtures("lacking")
def test_what_a_machine_lacks_is_said_and_skipped(appendkv):
    found = appendkv()
    assert {found[step].verdict for step in STEPS} == {Verdict.SKIPPED}
    assert "does not compile for" in found["built"].about
    assert "needs a CPU of family ppc64le" in why_unavailable(ARCH)


def test_a_cpu_that_nobody_knows_is_a_mistake_of_the_file(spec):
    edit(spec.parent.parent.parent / "toolchains" / "host.json", "arches", ARCH, "cpu", value="z80")
    with pytest.raises(SpecError, match=r"arches\.my_cpu\.cpu: archspec knows no CPU 'z80'"):
        why_unavailable(ARCH)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--arch", "gfx9000"], 2, "no arch is called 'gfx9000'"),
        (["--arch", "gfx950", "--revision", "1999-01"], 2, "has no revision '1999-01'"),
        (["--arch", "sm_90", "--arch", "sm_09"], 2, "no arch is called 'sm_09'; did you mean sm_90?"),
        (["--revision", "1999-01"], 2, "no arch has a revision '1999-01'"),
        pytest.param(["--arch", "sm_90", "--no-build", "--failures"], 0, "sm_90 conforms: ", marks=pytest.mark.slow),
    ],
)
def test_the_command_exits_with_what_it_found(words, code, message):
    done = command.catalog("conformance", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert message in done.stderr


@pytest.mark.slow
def test_a_failure_is_an_exit_code(spec):
    edit(spec, "enumerations", "fwd", "constraints", value=_rules([["idle", "tile_m0 < 999"]]))
    done = command.catalog("conformance", "--arch", ARCH, "--no-build", "--format", "json")
    assert done.returncode == 1
    assert "DOES NOT CONFORM" in done.stderr
    assert [row["subject"] for row in json.loads(done.stdout) if row["verdict"] == "failed"] == ["fwd: idle"]


def test_without_a_name_it_is_every_arch_in_each_revision():
    asked = asked_archs(())
    assert {("gfx942", "2025-07"), ("gfx942", "2026-05"), ("sm_90", None), ("x86_64_v3", None)} < set(asked)
    of_aiter = ("gfx90a", "gfx942", "gfx950", "gfx1200", "gfx1201", "gfx908")
    assert asked_archs((), "2025-11") == [(arch, "2025-11") for arch in of_aiter]
    assert asked_archs((), "2025-07") == [(arch, "2025-07") for arch in ("gfx90a", "gfx942", "gfx950")]
