"""A walk over all commands: help, examples, formats, exit codes, completion."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from conftest import slow_but
from typer.testing import CliRunner

from catalog.cli.main import SECTIONS, app
from catalog.errors import UsageError
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.runtime.exchange import export_bundle
from catalog.settings import settings

ROOT = Path(__file__).parent.parent
PROGRAM = typer.main.get_command(app)
NO_ROWS = {"export", "export aiter-csv", "export register", "export wrap", "datasette-metadata", "serve"}
"""Their --format is another one, their output is JSON as it is, or they run until Ctrl-C."""


def walk(command, path=()):
    """Every command with the words that call it, groups among them."""
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(PROGRAM))
JOBS = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


def examples(command):
    """What help says to type, as words after ``catalog``."""
    text = (command.help or "").replace("\n\n", "\0").replace("\n", " ")
    found = re.findall(r"Example: ([^\0]+)", text)
    return [shlex.split(example)[1:] for example in found]


def parsed(words):
    """The command that the words call, and the path to it; nothing is run."""
    command, context, path = PROGRAM, None, []
    while True:
        context = command.make_context(path[-1] if path else "catalog", list(words), parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not rest or rest[0] not in getattr(command, "commands", {}):
            return " ".join(path)
        path.append(rest[0])
        command, words = command.commands[rest[0]], rest[1:]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_and_an_example_that_would_run(path):
    shown = CliRunner().invoke(app, [*path.split(), "--help"])
    assert shown.exit_code == 0, shown.output
    found = examples(COMMANDS[path])
    assert found, "no example"
    for words in found:
        assert parsed(words).startswith(path)
    assert "Example: " in shown.output


def test_help_names_every_command_once_and_cuts_no_summary():
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    sections = dict(re.findall(r"^(\w+):\n((?:  .+\n)+)", shown, re.MULTILINE))
    listed = [line.split()[0] for title in SECTIONS for line in sections[title].splitlines()]
    assert sorted(listed) == sorted(PROGRAM.commands)
    for group in ("", "cache", "export", "timings"):
        shown = CliRunner().invoke(app, [*group.split(), "--help"], terminal_width=80).output
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage:")]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_described(path):
    parameters = COMMANDS[path].get_params(PROGRAM.make_context("catalog", [], resilient_parsing=True))
    assert not [parameter.name for parameter in parameters if not parameter.help]


@pytest.mark.parametrize("path", COMMANDS)
def test_an_unknown_option_is_bad_usage(path):
    done = CliRunner().invoke(app, [*path.split(), "--nonsense"])
    assert done.exit_code == 2


@pytest.mark.parametrize("path", [path for path in JOBS if path not in NO_ROWS])
def test_every_command_with_output_has_formats_and_refuses_others_before_the_work(path):
    words = examples(JOBS[path])[0]
    done = CliRunner().invoke(app, [*words, "--format", "xml"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "--format xml is not allowed\nAllowed: table, json, jsonl or csv."
    assert done.output == ""


def test_exceptions_are_commands():
    assert set(COMMANDS) >= NO_ROWS


BUILT = "family='bwd_convert_dq' AND dtype='fp32'"


@pytest.fixture(scope="module")
def workplace(populated, tmp_path_factory):
    """A catalog of sm_90 with a few kernels of the host, a cache with a library, and a bundle of it."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CATALOG_DB", str(folder / "catalog.db"))
        patch.setenv("CATALOG_CACHE_DIR", str(folder / "cache"))
        settings.cache_clear()
        catalog = Catalog(shutil.copy(populated("sm_90"), folder / "catalog.db"))
        catalog.populate("host", restriction=Restriction(where=BUILT))
        [kernel] = catalog.kernels(BUILT, arch="host", limit=1)
        catalog.build(kernel)
        export_bundle(catalog, "built", folder / "kernels.bundle")
        catalog.close()
        yield folder
    settings.cache_clear()


@pytest.fixture
def invoke(workplace, monkeypatch):
    return invoking(workplace, monkeypatch)


def invoking(folder, monkeypatch):
    """A function that calls a command in ``folder``, with its catalog and its cache."""
    monkeypatch.setenv("CATALOG_DB", str(folder / "catalog.db"))
    monkeypatch.setenv("CATALOG_CACHE_DIR", str(folder / "cache"))
    monkeypatch.chdir(folder)
    settings.cache_clear()
    return lambda *words: CliRunner().invoke(app, words, catch_exceptions=False)


PROBLEM = "--batch 1 --nhead-q 2 --seqlen-q 64 --hdim-q 64"
SHOWN = [
    "populate --arch sm_90",
    "query 'hdim_q = 64' --arch sm_90 --limit 2",
    "columns",
    "rules --arch sm_90",
    "shapes smoke",
    f"select {PROBLEM} --arch sm_90",
    f"explain {PROBLEM} --arch sm_90",
    "explain family=fwd dtype=fp32 --arch sm_90",
    "conformance --operation conv --arch sm_90 --no-build",
    f'build "{BUILT}" --limit 1',
    "cache path",
    "cache ls",
    "cache verify",
    "cache export kernels.bundle --where built",
    "cache import kernels.bundle --trust",
    "wheel --where built --split dtype",
    "cache quarantined",
    "cache unquarantine --all",
    "cache gc --older-than 1d --dry-run",
]
CLEARING = ["cache clear --yes", "timings clear --yes"]
EMPTY = {"cache verify", "cache quarantined", "cache unquarantine --all"}


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: " ".join(words.split()[:2]))
def test_formats_say_the_same(invoke, words):
    require_equal_formats(invoke, words)


@pytest.mark.parametrize("words", CLEARING)
def test_formats_say_the_same_of_what_was_cleared(workplace, tmp_path, monkeypatch, words):
    require_equal_formats(invoking(shutil.copytree(workplace, tmp_path / "copy"), monkeypatch), words)


def require_equal_formats(invoke, words):
    """A command prints the same columns and the same number of rows as CSV and as JSON."""
    printed = {}
    for form in ("csv", "json"):
        done = invoke(*shlex.split(words), "--format", form)
        assert done.exit_code == 0, done.output
        printed[form] = done.stdout
    rows = json.loads(printed["json"])
    table = list(csv.DictReader(io.StringIO(printed["csv"])))
    assert bool(rows) is (words not in EMPTY)
    assert [list(row) for row in table] == [list(row) for row in rows]


@pytest.mark.slow
def test_nothing_to_compare_with_is_an_exit_code_and_no_row(invoke):
    done = invoke("parity", "--arch", "gfx1201", "--format", "json")
    assert (done.exit_code, json.loads(done.stdout)) == (2, [])


def complete(line):
    """What bash would offer at the end of the line."""
    words = line.split(" ")
    variables = {"_CATALOG_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv = ['catalog']; from catalog.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    return done.stdout.split()


COMPLETIONS = [
    ("catalog co", ["columns", "conformance"]),
    ("catalog cache q", ["quarantined"]),
    ("catalog columns --format js", ["json", "jsonl"]),
    ("catalog populate --arch gfx95", ["gfx950"]),
    ("catalog replay calls.jsonl --ver", ["--verify"]),
    ("catalog run attention --hdim", ["--hdim-q", "--hdim-v"]),
]


@pytest.mark.parametrize(("line", "offered"), slow_but(COMPLETIONS[3:4], COMPLETIONS))
def test_the_shell_completes(line, offered):
    assert complete(line) == offered


def test_the_page_names_every_exit_code_and_what_is_no_format():
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "130"]
    by_findings = page.partition("exit with 1 by what they find:")[2].partition("##")[0]
    for words in re.findall(r"`([^`]+)`", by_findings):
        path = words.partition(" --")[0]
        assert path in JOBS
        assert "1 " in re.sub(r"\s+", " ", JOBS[path].help or ""), f"{path} does not say when it exits with 1"
