"""Rows written for another build, compiled, linked and run there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import command
import pytest

from catalog.backends import target_of, toolset_of
from catalog.build.export import rows
from catalog.errors import UsageError
from catalog.runtime.catalog import Catalog

export_register = partial(rows.export_register, targets=target_of, toolsets=toolset_of)

MAIN = """
#include <stdio.h>
#include <string.h>
#include "mine_register.h"

static int32_t add(const mine_kernel* kernel, void* context) {
    if (context && strcmp(kernel->arch, "none")) return kernel->launch(NULL, NULL);
    if (!strstr(kernel->describe(), kernel->id)) return 9;
    return puts(kernel->name) < 0;
}

int main(void) { return mine_register_kernels(add, NULL) * 10 + mine_register_kernels(add, ""); }
"""


@pytest.fixture(scope="module")
def catalog(host_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog(shutil.copy(host_file, tmp_path_factory.mktemp("export") / "catalog.db"))


@pytest.mark.slow
def test_a_set_of_kernels_links_into_a_program_of_c(catalog: Catalog, tmp_path: Path) -> None:
    kernels = catalog.kernels("family LIKE 'bwd_%' AND hdim_q = 32 AND dtype = 'fp32'", limit=1)
    kernels += catalog.kernels("family = 'fwd_splitkv_combine'", limit=1)
    assert len(kernels) == 2
    written = export_register(kernels, tmp_path, "mine")
    assert all(path.is_file() for path in written)
    inventory = json.loads((tmp_path / "inventory.json").read_text())
    listed, flags = inventory["kernels"], inventory["compile_flags"][kernels[0].arch]
    assert {(row["id"], row["family"]) for row in listed} == {(kernel.id, kernel.family) for kernel in kernels}

    (tmp_path / "main.c").write_text(MAIN)
    sources = [*(row["file"] for row in listed), "mine_register.cpp"]
    for compile_command in (
        ["gcc", "-Wall", "-Werror", "-Iinclude", "-c", "main.c", "-o", "main.o"],
        ["g++", *flags, "-O1", "-Iinclude", *sources, "main.o", "-o", "main"],
    ):
        done = subprocess.run(compile_command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    ran = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2, "the second call ends with what the first kernel says to no arguments"
    assert ran.stdout.split() == sorted(kernel.name for kernel in kernels)

    (tmp_path / "mine_register.h").write_text("changed")
    assert export_register(kernels, tmp_path, "mine") == [tmp_path / "mine_register.h"]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(catalog: Catalog, tmp_path: Path) -> None:
    (kernel,) = catalog.kernels("family = 'fwd'", limit=1)
    out = tmp_path / "out"
    for kernels, prefix, says in (
        ([], "mine", "no kernels"),
        ([kernel, kernel], "mine", "two rows"),
        ([kernel], "not a name", "C identifier"),
    ):
        with pytest.raises(UsageError, match=says):
            export_register(kernels, out, prefix)
    assert not out.exists()


def test_the_command_line_writes_the_same(catalog: Catalog, tmp_path: Path) -> None:
    where = "family = 'fwd_splitkv_combine' AND dtype = 'fp32'"
    done = command.catalog("export", "register", "--where", where, "--out", tmp_path, db=catalog.path)
    count = len(catalog.kernels(where))
    assert count > 1
    assert done.stdout.startswith(f"{count} kernels in {tmp_path}: "), done.stderr
    assert len(list((tmp_path / "kernels").iterdir())) == count


@pytest.mark.parametrize("name", ["elsewhere/kept.txt", "../kept.txt", "HERE/kept.txt", "\0"])
def test_nothing_outside_of_the_folder_is_removed(name: str, catalog: Catalog, tmp_path: Path) -> None:
    """An inventory is a file that anybody can write: what it lists may lead out, by a link too."""
    kernels, out, kept = catalog.kernels("family = 'fwd'", limit=1), tmp_path / "out", tmp_path / "kept.txt"
    export_register(kernels, out, "mine")
    kept.write_text("kept")
    (out / "elsewhere").symlink_to(tmp_path)
    inventory = json.loads((out / "inventory.json").read_text())
    inventory["files"].append(name.replace("HERE", str(tmp_path)))
    (out / "inventory.json").write_text(json.dumps(inventory))
    export_register(kernels, out, "mine")
    assert kept.read_text() == "kept"


def test_nothing_is_written_through_a_link(catalog: Catalog, tmp_path: Path) -> None:
    kernels, out = catalog.kernels("family = 'fwd'", limit=1), tmp_path / "out"
    export_register(kernels, out, "mine")
    (out / "include").rename(tmp_path / "moved")
    (out / "include").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="by a link"):
        export_register(kernels, out, "mine")
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", None])
def test_what_is_no_inventory_makes_no_folder_ours(content: str | None, catalog: Catalog, tmp_path: Path) -> None:
    if content is None:
        os.mkfifo(tmp_path / "inventory.json")
    else:
        (tmp_path / "inventory.json").write_text(content)
    with pytest.raises(UsageError, match=r"has no inventory\.json of an export"):
        export_register(catalog.kernels("family = 'fwd'", limit=1), tmp_path, "mine")
