"""Content keys: what they change with, and what they do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rough import in_child
from tiny_project import Project, make_project

from catalog.build.keys import hash_parts
from catalog.build.toolchains import parse_make_rule
from catalog.errors import BuildError


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


# Content keys


@given(st.dictionaries(st.text(), st.lists(st.text())), st.dictionaries(st.text(), st.lists(st.text())))
def test_parts_hash_alike_only_if_equal(a: dict[str, list[str]], b: dict[str, list[str]]) -> None:
    assert (hash_parts(a) == hash_parts(b)) == (a == b)
    assert hash_parts(dict(reversed(a.items()))) == hash_parts(a)


def test_parts_do_not_run_together() -> None:
    assert hash_parts({"flags": ["-O3", "-g"]}) != hash_parts({"flags": ["-O3-g"]})
    assert hash_parts({"a": ["b"]}) != hash_parts({"a": [], "b": []})


def _with_compiler(field: str, project: Project) -> None:
    compiler = replace(project.toolchain.compiler, **{field: "/opt/other/g++"})
    # The scan has to run the compiler, so a path that differs must exist.
    if field == "path":
        copy = project.folder.parent / "g++"
        copy.symlink_to(project.toolchain.compiler.path)
        compiler = replace(compiler, path=copy)
    project.toolchain = replace(project.toolchain, compiler=compiler)


def _with_flags(field: str, project: Project) -> None:
    flags = (*getattr(project.toolchain, field), "-g")
    project.toolchain = replace(project.toolchain, **{field: flags})


CHANGES: dict[str, Callable[[Project], None]] = {
    "source": lambda p: setattr(p, "source", p.source + "// more\n"),
    "header": lambda p: p.write("entry.hpp", '#include "inner.hpp"\n'),
    "inner header": lambda p: p.write("inner.hpp", "#define OFFSET 1001\n"),
    "abi": lambda p: p.write("abi.h", "#define CATALOG_ABI_VERSION 2\n"),
    "isa": lambda p: setattr(p, "toolchain", replace(p.toolchain, isa="other")),
    "compile flags": partial(_with_flags, "compile_flags"),
    "link flags": partial(_with_flags, "link_flags"),
    "compiler version": partial(_with_compiler, "version"),
    "compiler digest": partial(_with_compiler, "digest"),
    "compiler path": partial(_with_compiler, "path"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with(change: str, project: Project, tmp_path: Path) -> None:
    before = project.key(tmp_path)
    assert project.key(tmp_path) == before
    CHANGES[change](project)
    assert project.key(tmp_path).hex != before.hex


def _touch(project: Project) -> None:
    for header in project.folder.iterdir():
        os.utime(header, (0, 0))


SAMES: dict[str, Callable[[Project], None]] = {
    "folder": Project.move,
    "times": _touch,
    "unrelated header": lambda p: p.write("other.hpp", "#error never read"),
    "launcher": lambda p: setattr(p, "toolchain", replace(p.toolchain, launcher=("ccache",))),
}


@pytest.mark.parametrize("change", SAMES)
@pytest.mark.parametrize("memory", ["remembered", "forgotten"])
def test_key_does_not_change_with(change: str, memory: str, project: Project, tmp_path: Path) -> None:
    before = project.key(tmp_path)
    if memory == "forgotten":
        tmp_path = tmp_path / "elsewhere"
    SAMES[change](project)
    assert project.key(tmp_path).hex == before.hex


def test_key_follows_new_includes(project: Project, tmp_path: Path) -> None:
    project.key(tmp_path)
    project.write("late.hpp", "#define OFFSET 1\n")
    project.write("inner.hpp", '#include "late.hpp"\n')
    before = project.key(tmp_path)
    project.write("late.hpp", "#define OFFSET 2\n")
    assert project.key(tmp_path).hex != before.hex


def test_key_covers_system_headers(project: Project, tmp_path: Path) -> None:
    project.write("inner.hpp", "#include <stddef.h>\n#define OFFSET 1000\n")
    headers = project.key(tmp_path).headers
    assert any(path.endswith("/stddef.h") for path in headers)
    assert os.path.realpath(project.folder / "inner.hpp") in headers


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: _use_flags(p, "-march=native"), "-march=native"),
        (lambda p: _use_flags(p, "@flags.txt"), "@flags.txt"),
        (lambda p: p.write("inner.hpp", 'asm(".incbin \\"data\\"");\n'), "inner.hpp"),
        (lambda p: p.write("abi.h", "\n"), "CATALOG_ABI_VERSION"),
    ],
)
def test_what_cannot_be_observed_is_not_keyed(
    spoil: Callable[[Project], None], named: str, project: Project, tmp_path: Path
) -> None:
    spoil(project)
    with pytest.raises(BuildError, match=named):
        project.key(tmp_path)


def _use_flags(project: Project, *flags: str) -> None:
    project.toolchain = replace(project.toolchain, compile_flags=flags)


def test_make_rules_are_unescaped() -> None:
    assert parse_make_rule("kernel.o : kernel.cpp \\\n") == ["kernel.cpp"], "as nvcc writes it"
    assert parse_make_rule("kernel.o: kernel.cpp a\\ b/$$x.h \\\n /c\\#.h\n") == ["kernel.cpp", "a b/$x.h", "/c#.h"]


@pytest.mark.parametrize("memory", ["pipe", "nested", "endless header", "typed otherwise"])
def test_what_is_remembered_of_headers_is_checked(memory: str, project: Project, tmp_path: Path) -> None:
    """A remembered answer that is none is asked for again."""
    key = project.key(tmp_path)
    [memo] = tmp_path.glob("*.json")
    kept = memo.read_text()
    memo.unlink()
    if memory == "pipe":
        os.mkfifo(memo)
    else:
        endless = json.dumps(json.loads(kept) | {"names": ["/dev/zero"]})
        memo.write_text({"nested": "[" * 100_000, "endless header": endless, "typed otherwise": '{"names": 1}'}[memory])
    assert in_child(lambda: project.key(tmp_path).hex, timeout=30) == key.hex
    assert memo.read_text() == kept
