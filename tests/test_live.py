"""Live parity: generators of small made-up checkouts, as real processes, against the catalog of gfx950."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import command
import pytest
from conftest import slow_but

from catalog.build import generators
from catalog.errors import GeneratorError, UsageError
from catalog.ops.attention.names import parse_name
from catalog.ops.attention.upstream.live import find_generator
from catalog.rules.parity import Lists, Live
from catalog.rules.populate import Request
from catalog.runtime.catalog import Catalog
from catalog.runtime.demand import Demand
from catalog.schema.deployment import Deployment
from catalog.schema.spec_files import find_spec, load_spec_file

DATA = Path(__file__).parent.parent / "data"
MODELS = Path(__file__).parent.parent / "examples" / "models"
RECEIPT = 801
APIS = ("batch_prefill", "bwd", "fwd", "fwd_appendkv", "fwd_splitkv", "pagedkv_prefill")
API_OF_FAMILY = {"fwd_splitkv_combine": "fwd_splitkv", "fwd_pagedkv": "pagedkv_prefill"}

COMMAND_LINE = """
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import codegen.ops

parser = argparse.ArgumentParser()
{targets}
parser.add_argument("-d", "--direction", "-a", "--api", default="fwd")
parser.add_argument("-l", "--list_blobs")
parser.add_argument("-m", "--mask", default="simplified")
parser.add_argument("-r", "--receipt", default=0)
parser.add_argument("-f", "--filter", default="")
args = parser.parse_args()
"""

LISTS = """
folder = Path(args.list_blobs).parent
names = Path(__file__).with_name("names") / args.mask / str(args.receipt) / args.direction
with open(args.list_blobs, "a") as file:
    for name in [*(names.read_text().split() if names.is_file() else ()), "fmha_" + args.direction + "_api"]:
        file.write((folder / (name + ".cpp")).as_posix() + "\\n")
"""

STAGES = {"bwd": ("bwd_dot_do_o", "bwd_convert_dq", "bwd_d"), "fwd_splitkv": ("fwd_splitkv_combine", "fwd_splitkv_d")}
"""How the names of an API's stages begin after ``fmha_``, in the order of their patterns."""

FILTERS = """
from fnmatch import fnmatch

STAGES = {stages}
folder = Path(__file__).with_name("names") / args.mask / str(args.receipt)
for api, patterns in zip(args.direction.split(","), args.filter.split(",")):
    for stage, pattern in zip(STAGES.get(api, ("",)), patterns.split("@")):
        for name in (folder / api).read_text().split():
            if name.startswith("fmha_" + stage) and fnmatch(name.rpartition("_gfx")[0] or name, pattern):
                print(name)
"""


def make_checkout(root: Path, body: str = LISTS, targets: bool = True, place: str = "") -> Path:
    """A folder with a generator, whose last part is ``body``."""
    example = root / place / "example" / "ck_tile" / "01_fmha"
    ops = example / "codegen" / "ops"
    ops.mkdir(parents=True)
    (ops / "__init__.py").touch()
    for api in APIS:
        (ops / f"fmha_{api}.py").touch()
    option = 'parser.add_argument("--targets", default="gfx9,gfx950")' if targets else ""
    (example / "generate.py").write_text(COMMAND_LINE.format(targets=option) + body)
    return root


def give_names(root: Path, names: frozenset[str], mask_impl: str = "generic", receipt: int = RECEIPT) -> None:
    """Let the generator of ``root`` list ``names``, each by its API."""
    folder = root / "example" / "ck_tile" / "01_fmha" / "names" / mask_impl / str(receipt)
    folder.mkdir(parents=True, exist_ok=True)
    by_api: dict[str, list[str]] = {}
    for name in names:
        family = str(parse_name(name)["family"])
        by_api.setdefault("bwd" if family.startswith("bwd") else API_OF_FAMILY.get(family, family), []).append(name)
    for api, listed in by_api.items():
        (folder / api).write_text("\n".join(listed))


def request_of(mask_impl: str = "generic", arch: str = "gfx950", revision: str = "2026-05") -> Request:
    return Request(load_spec_file(find_spec((DATA / "arch_specs",), arch, revision)), mask_impl)


def reference(
    receipt: int, mask_impl: str = "generic", arch: str = "gfx950", revision: str = "2026-05"
) -> frozenset[str]:
    return Lists(DATA / "parity").names(request_of(mask_impl, arch, revision), receipt)


def parity(db: Path, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command.catalog("parity", "--ck-root", root, *words, db=db)


def snapshot(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


@pytest.fixture(scope="module")
def database(gfx950: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "catalog.db"
    with sqlite3.connect(path) as target:
        gfx950.connection.backup(target)
    target.close()
    return path


@pytest.mark.slow
def test_a_generator_that_lists_the_same_passes_and_its_checkout_stays_as_it_was(
    database: Path, tmp_path: Path
) -> None:
    root = make_checkout(tmp_path / "ck")
    for receipt in (2, 3):
        give_names(root, reference(receipt), receipt=receipt)
    before = snapshot(root)
    done = parity(database, root, "--receipt", "flash")
    assert done.returncode == 0, done
    sizes = [len(reference(receipt)) for receipt in (2, 3)]
    assert done.stdout.splitlines() == [
        f"PASS: {size:,} kernels across 9 families (gfx950, receipt {receipt}, generic)"
        for size, receipt in zip(sizes, (2, 3), strict=True)
    ]
    assert done.stderr.startswith(str(root))
    assert "like revision 2026-05, it takes --targets" in done.stderr
    assert snapshot(root) == before


@pytest.mark.slow
def test_a_generator_that_lists_others_fails_with_their_names(database: Path, tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "ck")
    names = reference(2)
    gone = min(name for name in names if name.startswith("fmha_bwd_dot_do_o"))
    new = min(reference(0) - names)
    give_names(root, names - {gone} | {new}, receipt=2)
    done = parity(database, root, "--receipt", "2")
    assert done.returncode == 1
    assert done.stdout.startswith(f"FAIL: 1 missing, 1 extra of {len(names):,} kernels")
    assert f"+ {gone}" in done.stdout
    assert f"- {new}" in done.stdout


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ("print('no such thing'); sys.exit(3)", ["exit status 3", "no such thing", "Run it yourself"]),
        ("raise RuntimeError('out of luck')", ["RuntimeError: out of luck", "Run it yourself"]),
        ("import yaml_of_another_kind", ["pip install yaml_of_another_kind"]),
        ("import codegen.arch", ["incomplete: codegen.arch"]),
        ("time.sleep(60)", ["stopped after 1 s", "--timeout"]),
        ("print('done')", ["listed nothing", "done"]),
        ("Path(args.list_blobs).write_text('\\x00 who\\nknows\\n')", ["line 1 of the list", "who"]),
        ("Path(args.list_blobs).write_text('a/fmha_fwd_api.cpp\\na/gemm.cpp\\n')", ["line 2 of the list", "gemm"]),
        ("Path(args.list_blobs).write_bytes(b'\\xff\\xfe')", ["line 1 of the list"]),
        ("os.kill(os.getpid(), 9)", ["killed by SIGKILL"]),
        ("while True: print('endless')", ["stopped after 1 MiB of output", "endless", "Run it yourself"]),
        ("file = open(args.list_blobs, 'w')\nwhile True: file.write('endless' * 4096)", ["stopped after 1 MiB"]),
    ],
)
def test_a_generator_that_gives_no_list_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fragments: list[str]
) -> None:
    monkeypatch.setattr(generators, "MOST_BYTES", 2**20)
    root = make_checkout(tmp_path / "ck", body)
    generator = replace(find_generator(root, 30), apis=("fwd",), timeout=1 if "sleep" in body else 30)
    with pytest.raises(GeneratorError) as error:
        Live(generator).names(request_of(), RECEIPT)
    for fragment in fragments:
        assert fragment in str(error.value)
    assert not list(root.rglob("__pycache__"))


def test_a_failing_generator_is_one_message_and_exit_code_2(database: Path, tmp_path: Path) -> None:
    done = parity(database, make_checkout(tmp_path / "ck", "sys.exit('out of luck')"), "--receipt", "pytorch")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "exit status 1.\n  out of luck\nHint: Run it yourself" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_generator_that_cannot_even_say_its_options_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "ck")
    (root / "example" / "ck_tile" / "01_fmha" / "codegen" / "ops" / "__init__.py").write_text("import not_there")
    with pytest.raises(GeneratorError, match="not_there") as error:
        find_generator(root, 30).revision  # noqa: B018
    assert error.value.exit_code == 2


@pytest.mark.slow
def test_a_hanging_generator_is_killed_with_what_it_started(tmp_path: Path) -> None:
    body = (
        f"child = subprocess.Popen(['sleep', '600'])\nPath({str(tmp_path)!r}, str(child.pid)).touch()\ntime.sleep(600)"
    )
    root = make_checkout(tmp_path / "ck", body)
    generator = find_generator(root, timeout=1)
    started = time.monotonic()
    with pytest.raises(GeneratorError, match="stopped after 1 s"):
        Live(generator).names(request_of(), RECEIPT)
    assert time.monotonic() - started < 10
    children = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert children
    assert not any(runs(child) for child in children)


def runs(process: int) -> bool:
    """Whether it lives: a dead one that nobody waited for does not."""
    for _ in range(50):
        done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
        if not done.stdout.strip() or done.stdout.startswith("Z"):
            return False
        time.sleep(0.1)
    return True


def test_one_failing_api_stops_the_others_at_once(tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "ck", "sys.exit('no') if args.direction == 'bwd' else time.sleep(600)")
    started = time.monotonic()
    with pytest.raises(GeneratorError, match="--api bwd"):
        Live(replace(find_generator(root, 30), apis=("fwd", "bwd"))).names(request_of(), RECEIPT)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("place", "root"),
    [
        ("", "."),
        ("", "example/ck_tile"),
        ("", "example/ck_tile/01_fmha"),
        ("", "example/ck_tile/01_fmha/generate.py"),
        ("share/composable_kernel", "."),
        ("projects/composablekernel", "."),
        ("csrc/composable_kernel", "."),
        ("aiter_meta/3rdparty/composable_kernel", "."),
        ("", "example/ck_tile/01_fmha/codegen/ops"),
    ],
)
def test_a_generator_is_found_in_every_layout(tmp_path: Path, place: str, root: str) -> None:
    make_checkout(tmp_path, place=place)
    generator = find_generator(tmp_path / root, 30)
    assert generator.path == tmp_path / place / "example" / "ck_tile" / "01_fmha" / "generate.py"
    assert generator.apis == APIS


def test_a_folder_without_a_generator_or_with_two_says_so(database: Path, tmp_path: Path) -> None:
    inside = make_checkout(tmp_path / "inside") / "nowhere"
    done = parity(database, inside)
    assert done.returncode == 2
    assert f"{inside} holds no FMHA generator" in done.stderr
    shutil.rmtree(tmp_path / "inside")
    (tmp_path / "include" / "ck_tile").mkdir(parents=True)
    with pytest.raises(UsageError, match="ROCm packages leave it out"):
        find_generator(tmp_path, 30)
    for name in ("a", "b"):
        make_checkout(tmp_path, place=name)
    with pytest.raises(UsageError, match="several CK checkouts"):
        find_generator(tmp_path, 30)


def test_another_generator_is_refused_by_its_options(tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "ck")
    path = root / "example" / "ck_tile" / "01_fmha" / "generate.py"
    path.write_text("print('usage: generate [--api API] [--output_dir DIR]')")
    with pytest.raises(GeneratorError, match="takes no --list_blobs, no --mask, no --receipt"):
        find_generator(root, 30).revision  # noqa: B018


def test_a_checkout_lists_for_the_arch_and_mask_impl_asked_and_is_asked_once(tmp_path: Path) -> None:
    note = f"Path({str(tmp_path / 'calls')!r}, args.direction).open('a').write(f'{{args.targets}} {{args.mask}}\\n')"
    root = make_checkout(tmp_path / "ck", note + LISTS)
    (tmp_path / "calls").mkdir()
    for mask_impl in ("generic", "simplified"):
        give_names(root, reference(RECEIPT, mask_impl), mask_impl)
    generator = Live(find_generator(root, 30))
    for mask_impl in ("generic", "simplified", "generic"):
        assert generator.names(request_of(mask_impl), RECEIPT) == reference(RECEIPT, mask_impl)
    assert (tmp_path / "calls" / "bwd").read_text() == "gfx950 generic\ngfx950 simplified\n"


@pytest.mark.slow
def test_an_older_generator_lists_the_same_for_every_arch_and_is_held_against_the_older_revision(
    tmp_path: Path,
) -> None:
    calls = tmp_path / "calls"
    root = make_checkout(tmp_path / "ck", f"open({str(calls)!r}, 'a').write(args.direction + ' ')" + LISTS, False)
    names = reference(4, arch="gfx942", revision="2025-07")
    give_names(root, names, receipt=4)
    for arch in ("gfx942", "gfx950"):
        Catalog(tmp_path / "catalog.db").populate(arch, revision="2025-07", receipts=(4,))
    done = parity(tmp_path / "catalog.db", root, "--receipt", "pytorch", "--arch", "gfx942", "--arch", "gfx950")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        f"PASS: {len(names):,} kernels across 8 families ({arch}, receipt 4, generic)" for arch in ("gfx942", "gfx950")
    ]
    assert "like revision 2025-07, it takes no --targets" in done.stderr
    assert sorted(calls.read_text().split()) == sorted(APIS)


@pytest.mark.parametrize(
    ("targets", "forward", "revision", "why"),
    [
        (False, "F_squant: str", "2025-07", "takes no --targets"),
        (True, "F_squant: str", "2025-11", "takes --targets and calls the scales of forward kernels squant"),
        (True, "F_qscale: str", "2026-05", "takes --targets"),
    ],
)
def test_the_revision_is_detected_by_command_line_and_names(
    tmp_path: Path, targets: bool, forward: str, revision: str, why: str
) -> None:
    root = make_checkout(tmp_path, targets=targets)
    (root / "example" / "ck_tile" / "01_fmha" / "codegen" / "ops" / "fmha_fwd.py").write_text(forward)
    generator = find_generator(root, 30)
    assert generator.revision == revision
    assert generator.about.endswith(f"; like revision {revision}, it {why}.")


def test_names_that_belie_the_command_line_are_of_no_known_revision(tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "older", targets=False)
    give_names(root, reference(2), receipt=2)
    generator = Live(find_generator(root, 30))
    with pytest.raises(GeneratorError, match="its names carry a target: fmha_"):
        generator.names(request_of(revision="2025-07"), 2)
    assert generator.names(request_of(), 2) == reference(2)  # compared with 2026-05, as --revision may ask


@pytest.mark.parametrize("model", slow_but(["mixtral-8x7b"], ["llama-3.1-8b", "gemma-2-9b", "mixtral-8x7b"]))
def test_a_generator_makes_exactly_the_kernels_of_a_filter(model: str, gfx950: Catalog, tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "ck", FILTERS.replace("{stages}", repr(STAGES)))
    give_names(
        root, frozenset(name for name in reference(0) if "_d128_bf16" in name or "_d256_bf16" in name), receipt=0
    )
    config = MODELS / f"{model}.json"
    phases = ("prefill", "decode") + (("train",) if model.startswith("llama") else ())
    done = command.catalog(
        *("export", "filter", "--model", config, "--tp", 8, "--phase", ",".join(phases), "--arch", "gfx950"),
        db=gfx950.path,
    )
    assert done.returncode == 0, done.stderr
    [call] = [line for line in done.stderr.splitlines() if line.startswith("generate.py ")]
    program, *options = shlex.split(call)
    listed = subprocess.run(
        [sys.executable, root / "example" / "ck_tile" / "01_fmha" / program, *options],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = Demand.of_model(config, Deployment(tp=8, phases=phases), "gfx950").answers(gfx950).kernels
    assert set(listed) == {kernel.name for kernel in wanted}
    assert len(options[options.index("--api") + 1].split(",")) < len(wanted), "patterns were joined"


def test_no_filter_is_for_kernels_that_upstream_does_not_make(host_file: Path, tmp_path: Path) -> None:
    db = shutil.copy(host_file, tmp_path / "catalog.db")
    done = command.catalog("export", "filter", "--model", MODELS / "llama-3.1-8b.json", "--max-len", 16, db=db)
    assert done.returncode == 2
    assert "upstream's generator makes no kernels of" in done.stderr
