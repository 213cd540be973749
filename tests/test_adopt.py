"""Adopting a checkout: generators of small made-up checkouts, whose lists become revisions of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import command
import pytest
from test_ck_sources import FORWARD, OPTIONS, compiled_for_cpu
from test_live import LISTS, give_names, make_checkout, reference, snapshot
from test_merge import FIRST, write

from catalog.backends import target_of, toolset_of
from catalog.build.export.rows import export_register
from catalog.errors import BuildError, GeneratorError, ToolchainError, UsageError
from catalog.ops.attention.problem import Problem
from catalog.registry.adopted import Record, record_adopted
from catalog.registry.connection import connect
from catalog.registry.kernels import lineage_id
from catalog.registry.transactions import transaction
from catalog.rules.adopt import Adopted
from catalog.runtime.catalog import Catalog
from catalog.settings import settings

ARCH = "gfx950"
RECEIPT = 2
KNOWS = f"if receipt == {RECEIPT}: pass\n"
TILE, EDITED_TILE = "_b128x128x32x128x32x128_", "_b128x128x64x128x64x128_"
PROBLEM = Problem(batch=1, nhead_q=2, seqlen_q=64, hdim_q=128, dtype="bf16", lse=True)
"""A problem that kernels of the receipt answer."""
WORDS = ("--batch", 1, "--nhead-q", 2, "--seqlen-q", 64, "--hdim-q", 128, "--dtype", "bf16", "--lse")
"""The same problem as options."""


def checkout(root: Path, names: frozenset[str], body: str = "") -> Path:
    """A checkout whose only receipts are 0 and 2; both list ``names``."""
    make_checkout(root, f"receipt = int(args.receipt)\n{KNOWS}{body}{LISTS}")
    for receipt in (0, RECEIPT):
        give_names(root, names, receipt=receipt)
    return root


@pytest.fixture(scope="module")
def names() -> frozenset[str]:
    """The forward kernels of a receipt with few kernels."""
    return frozenset(name for name in reference(RECEIPT) if name.startswith("fmha_fwd_d"))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog.db")


def adopt(catalog: Catalog, root: Path, label: str | None = "my-ck", **options: object) -> Adopted:
    done = catalog.populate(ARCH, ck_root=root, label=label, **options)
    assert isinstance(done, Adopted)
    return done


def rows(catalog: Catalog, revision: str, columns: str = "name, dispatch_order") -> list[Sequence[object]]:
    asked = f"SELECT {columns} FROM attention_row WHERE revision = ? ORDER BY name"
    return [tuple(row) for row in catalog.connection.execute(asked, [revision])]


@pytest.mark.slow
def test_what_a_checkout_lists_becomes_rows_that_everything_works_on(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    root = checkout(tmp_path / "ck", names)
    before = snapshot(root)
    done = adopt(catalog, root)
    assert snapshot(root) == before, "nothing is written into it"
    assert (done.kernels, done.common, done.unknown) == (len(names), len(names), ())
    assert {name for name, _ in rows(catalog, "my-ck")} == names
    kernel = catalog.kernels("revision = 'my-ck' AND base = '2026-05' AND dtype = 'bf16'", limit=1)[0]
    assert kernel.name in names
    assert type(kernel).model_validate_json(kernel.model_dump_json()).name == kernel.name
    catalog.populate(ARCH, receipts=(RECEIPT,))
    known = dict(rows(catalog, "2026-05"))
    order = [known[name] for name, _ in sorted(rows(catalog, "my-ck"), key=lambda row: (row[1], known[row[0]]))]
    assert order == sorted(order), "the dispatch order is that of the nearest revision"
    chosen = catalog.choice(PROBLEM, arch=ARCH, revision="my-ck")
    assert "2026-05, the nearest known revision" in chosen.about
    assert [one.kernel.name for one in chosen.candidates][:1] == [
        one.kernel.name for one in catalog.candidates(PROBLEM, arch=ARCH, revision="2026-05")
    ][:1]
    explained = catalog.explain({"family": "fwd", "dtype": "bf16", "hdim_q": 7}, arch=ARCH, revision="my-ck")
    assert "tile_table" in explained.summary
    assert explained.summary.endswith("The rules are those of 2026-05, the nearest known revision.")


@pytest.mark.slow
def test_adopting_again_is_a_no_op_and_an_edit_is_another_revision(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    log = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')\n"
    root = checkout(tmp_path / "ck", names, log)
    first = adopt(catalog, root, None)
    revision = str(first.request.spec.revision)
    assert revision.startswith("ck-")
    runs = (tmp_path / "runs").read_text()
    again = adopt(catalog, root, None)
    assert again.unchanged
    assert again.families == first.families
    assert (tmp_path / "runs").read_text() == runs, "nothing is listed again"
    old = {name for name in names if TILE in name}
    new_names = frozenset(name.replace(TILE, EDITED_TILE) for name in names)
    shutil.rmtree(root / "example" / "ck_tile" / "01_fmha" / "names")
    give_names(root, new_names)
    give_names(root, new_names, receipt=0)
    (root / "example" / "ck_tile" / "01_fmha" / "codegen" / "ops" / "fmha_fwd.py").write_text("TILE = 32\n")
    with pytest.raises(UsageError, match="another state of the generator"):
        adopt(catalog, root, revision)
    second = str(adopt(catalog, root, None).request.spec.revision)
    assert second != revision
    found = catalog.diff(ARCH, revision, second)
    changes = [change for family in found.families for change in family.changed]
    assert {change.before for change in changes} == old
    assert {change.traits for change in changes} == {"tile_k0 32 -> 64, tile_k1 32 -> 64"}
    assert not any(family.appeared or family.vanished for family in found.families)


@pytest.mark.slow
def test_git_names_the_revision_unless_the_generator_was_edited(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    root = checkout(tmp_path / "ck", names)
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    before = snapshot(root)
    done = adopt(catalog, root, None)
    assert done.record is not None
    assert done.record.git_commit == commit[:12]
    assert done.request.spec.revision == f"ck-{commit[:12]}"
    assert snapshot(root) == before, "not even git's index"
    with (root / "example" / "ck_tile" / "01_fmha" / "generate.py").open("a") as file:
        file.write("# edited\n")
    assert adopt(catalog, root, None).request.spec.revision != f"ck-{commit[:12]}"


@pytest.mark.parametrize(
    ("replaced", "unknown"),
    [
        (("_bf16_batch", "_fp4_batch"), ("_fp4", "a value of dtype")),
        pytest.param(("_nbias", "_wide_nbias"), ("_wide", "between logits and bias"), marks=pytest.mark.slow),
        pytest.param(("_nlogits", ""), ("", "logits: missing"), marks=pytest.mark.slow),
        pytest.param(("fmha_fwd_d", "fmha_other_d"), ("fmha_other", "a family"), marks=pytest.mark.slow),
    ],
)
def test_a_name_that_the_grammar_cannot_read_is_kept_and_stops_nothing(
    catalog: Catalog, names: frozenset[str], tmp_path: Path, replaced: tuple[str, str], unknown: tuple[str, str]
) -> None:
    strange = max(name for name in names if replaced[0] in name and "_nlogits" in name)
    named = strange.replace(*replaced)
    root = checkout(tmp_path / "ck", names - {strange})
    for receipt in (0, RECEIPT):
        listed = root / "example" / "ck_tile" / "01_fmha" / "names" / "generic" / str(receipt) / "fwd"
        listed.write_text(f"{listed.read_text()}\n{named}")
    done = adopt(catalog, root)
    assert done.kernels == len(names) - 1
    [one] = done.unknown
    assert (one.name, one.part, one.place) == (named, *unknown)
    shown = command.catalog("adopted", "my-ck", "--unknown", db=catalog.path)
    assert named in shown.stdout
    assert unknown[1] in shown.stdout
    assert adopt(catalog, root).unknown == done.unknown


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ("sys.exit('out of luck')\n", "out of luck"),
        ("time.sleep(60)\n", "stopped after 1 s"),
        ("Path(args.list_blobs).write_text('\\x1b[31m rubbish\\n'); sys.exit()\n", "is not the path of a kernel"),
        ("Path(args.list_blobs).write_text('a/fmha_fwd_api.cpp\\n'); sys.exit()\n", "lists no kernels"),
    ],
)
def test_a_generator_that_gives_no_list_changes_nothing(
    catalog: Catalog, names: frozenset[str], tmp_path: Path, body: str, fragment: str
) -> None:
    root = checkout(tmp_path / "ck", names, body)
    with pytest.raises(GeneratorError, match=fragment):
        adopt(catalog, root, timeout=1.0 if "sleep" in body else 30.0)
    assert catalog.adopted() == []
    assert rows(catalog, "my-ck") == []


@pytest.mark.slow
@pytest.mark.usefixtures("hip_machine")
def test_without_its_checkout_an_adopted_kernel_says_where_it_was_adopted_from(
    populated: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building one or many and exporting name the path; without a compiler, the cache is looked in first."""
    catalog = Catalog(shutil.copy(populated("gfx90a", "2025-07"), tmp_path / "catalog.db"))
    [listed] = catalog.kernels("family = 'fwd'", arch="gfx90a", limit=1)
    with transaction(catalog.connection):
        lineage = lineage_id(catalog.connection, listed.lineage) or 0
        record_adopted(catalog.connection, lineage, Record("/home/me/a ck", "", "", "2025-07", "0", FIRST), ())
    [kernel] = catalog.kernels(f"id = '{listed.id}'", arch="gfx90a")
    with pytest.raises(BuildError, match="none is named") as error:
        catalog.build(kernel)
    hint = error.value.hint or ""
    assert hint.endswith("was adopted from /home/me/a ck")
    [failure] = catalog.builder.build_many([kernel]).failures
    assert failure.error.hint == hint
    out = ("--arch", "gfx90a", "--out", tmp_path / "out")
    done = command.catalog("export", "register", "--where", f"id = '{kernel.id}'", *out, db=catalog.path)
    assert done.returncode == 1
    assert hint in done.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("CATALOG_HIPCXX", "no-compiler")
    settings.cache_clear()
    with pytest.raises(ToolchainError, match="no-compiler"):
        catalog.build(kernel)
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.slow
def test_adopted_kernels_are_exported_and_compile_from_their_checkout(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = f"""
if args.output_dir:
    Path(args.output_dir, args.filter + ".cpp").write_text('#include "ck_tile/core.hpp"\\n' + {FORWARD!r})
    sys.exit()
"""
    root = make_checkout(tmp_path / "ck", f"receipt = int(args.receipt)\n{KNOWS}{writes}{LISTS}", targets=False)
    generator = root / "example" / "ck_tile" / "01_fmha" / "generate.py"
    generator.write_text(generator.read_text().replace("args = parser", f"{OPTIONS}args = parser"))
    (root / "include" / "ck_tile").mkdir(parents=True)
    names = reference(RECEIPT, arch="gfx90a", revision="2025-07")
    give_names(root, frozenset(name for name in names if name.startswith("fmha_fwd_d128_fp16_batch")), receipt=RECEIPT)
    done = catalog.populate("gfx90a", ck_root=root, label="my-ck")
    assert isinstance(done, Adopted)
    assert done.record is not None
    assert done.record.base == "2025-07"
    monkeypatch.setenv("CATALOG_CK_ROOT", str(root))
    settings.cache_clear()
    [kernel] = catalog.kernels("revision = 'my-ck' AND bias = 'no' AND mask = 'no' AND NOT lse", limit=1)
    export_register([kernel], tmp_path / "out", "mine", targets=target_of, toolsets=toolset_of)
    compiled_for_cpu((tmp_path / "out" / "kernels" / f"{kernel.name}.cpp").read_text(), tmp_path)
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.slow
def test_measurements_of_an_adopted_revision_go_where_it_was_adopted(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    root = checkout(tmp_path / "ck", names)
    adopt(catalog, root)
    [kernel] = catalog.kernels("revision = 'my-ck' AND dtype = 'bf16'", limit=1)
    tuned = write(tmp_path / "tuned.db", [kernel], [(0, 0, "built", FIRST)], [(0, 0, 0, 0, FIRST, 1.5)])
    with closing(connect(tuned)) as connection, transaction(connection):
        record_adopted(
            connection, lineage_id(connection, kernel.lineage) or 0, Record("/ck", "", "", "2026-05", "2", FIRST), ()
        )
    other = Catalog(tmp_path / "other.db")
    [left_out] = other.merge([tuned])
    command_line = f"catalog populate --ck-root CHECKOUT --arch {ARCH} --label my-ck --mask-impl generic"
    assert left_out.counts["timing"].total() == 0
    assert left_out.notes[0].endswith(command_line)
    adopt(other, root)
    [merged] = other.merge([tuned])
    assert merged.counts["timing"]["added"] == 1
    asked = "SELECT median_ms FROM timing JOIN kernel ON kernel.id = kernel_id WHERE name = ?"
    assert [row[0] for row in other.connection.execute(asked, [kernel.name])] == [1.5]
    without_a_gpu = [
        command.catalog("tune", "--arch", ARCH, "--revision", revision, *WORDS, db=other.path)
        for revision in ("my-ck", "2026-05")
    ]
    assert {done.returncode for done in without_a_gpu} <= {1}
    assert without_a_gpu[0].stderr.splitlines()[-2:] == without_a_gpu[1].stderr.splitlines()[-2:]


@pytest.mark.slow
def test_forgetting_deletes_the_revision_and_nothing_else(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    root = checkout(tmp_path / "ck", names)
    adopt(catalog, root)
    catalog.populate(ARCH, receipts=(RECEIPT,))
    kept = rows(catalog, "2026-05")
    with pytest.raises(UsageError, match="no revision '2026-05' was adopted"):
        catalog.forget_revision("2026-05")
    done = command.catalog("forget", "my-ck", "--yes", db=catalog.path)
    assert done.stdout == (f"Deleted {len(names)} kernels in 1 lineage, 0 builds and 0 timings of revision my-ck\n")
    assert rows(catalog, "my-ck") == []
    assert rows(catalog, "2026-05") == kept
    for table in ("lineage", "population", "adopted", "rule"):
        columns = "revision = 'my-ck'" if table in ("lineage", "rule") else "lineage NOT IN (SELECT id FROM lineage)"
        assert catalog.connection.execute(f"SELECT count(*) FROM {table} WHERE {columns}").fetchone()[0] == 0
    assert adopt(catalog, root).kernels == len(names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "2026-05"}, "is a known revision"),
        ({"label": "a b"}, "cannot be called"),
        ({"revision": "2026-05"}, "no revision, space or restriction"),
        ({"receipts": (700,)}, "has no receipt 700"),
    ],
)
def test_usage_errors(
    catalog: Catalog, names: frozenset[str], tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        catalog.populate(ARCH, ck_root=checkout(tmp_path / "ck", names), **options)


@pytest.mark.slow
def test_rows_of_an_adopted_revision_are_never_made_from_a_spec(
    catalog: Catalog, names: frozenset[str], tmp_path: Path
) -> None:
    adopt(catalog, checkout(tmp_path / "ck", names))
    for use in (
        lambda: catalog.populate(ARCH, revision="my-ck"),
        lambda: catalog.select(PROBLEM, arch=ARCH, revision="my-ck", mask_impl="simplified"),
    ):
        with pytest.raises(UsageError, match=r"catalog populate --ck-root .* --label my-ck"):
            use()
    with pytest.raises(UsageError, match="Adopted: my-ck"):
        catalog.spec(ARCH, "my-kc")


@pytest.mark.slow
def test_parity_names_the_nearest_revision_and_the_command_that_adopts(
    populated: Callable[..., Path], tmp_path: Path
) -> None:
    database = Path(shutil.copy(populated(ARCH), tmp_path / "catalog.db"))
    root = make_checkout(tmp_path / "ck")
    listed = reference(2)
    give_names(root, listed - {min(listed)}, receipt=2)
    done = command.catalog("parity", "--ck-root", root, "--receipt", "2", "--arch", ARCH, db=database)
    assert done.returncode == 1
    assert f"Nearest known revision: 2026-05, with {len(listed) - 1:,} of {len(listed) - 1:,} names" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == f"catalog populate --ck-root {root} --arch {ARCH}"
