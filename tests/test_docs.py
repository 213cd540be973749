"""Every command and every Python block of the pages runs, page by page, as a reader would go through them."""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import has_nvcc, missing, slow_but
from pages import PAGES, ROOT, Block, Command, blocks_of, commands_of, printed_by
from test_commands import parsed

TIMEOUT_S = 240.0
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
RUN = {"console", "python"}
TOOLS: dict[str | None, Callable[[], bool]] = {
    "PyTorch": lambda: find_spec("torch") is not None,
    "transformers": lambda: find_spec("transformers") is not None,
    "diffusers": lambda: find_spec("diffusers") is not None,
    "nvcc": has_nvcc,
}
"""Needs that are to be met in CI, and may be elsewhere."""
HERE = TOOLS | {None: lambda: True, "an x86-64 CPU": lambda: platform.machine() == "x86_64"}
"""Needs that a machine may meet; no other is met by any."""
MADE = {
    "commands": "catalog cache unquarantine",
    "settings": "CATALOG_CACHE_DIR",
    "traits": "interleaved or half-rotated pairs",
    "tables": "kernel_receipt",
    "python": "scaled_dot_product_attention",
}
"""Pages of the site that are made of the program, and something that each says."""
QUICK = [ROOT / "docs" / "reference" / "shapes.md"]
"""A page that takes a second."""
README = ROOT / "README.md"
PROGRAMS = ROOT / "tests" / "programs.py"
"""Runs neighbouring blocks of Python."""
EMPTIES_THE_CACHE = re.compile(r"catalog cache (clear|gc)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_to_run(page: Path) -> list[Block]:
    """The blocks that a machine may run."""
    return [block for block in blocks_of(page) if (block.language in RUN or block.title) and block.needs in HERE]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A command hides nowhere: whatever is one stands in a block that is run, or says what it needs."""
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        commands = re.findall(r"^\s*(?:\$ |catalog |make |pip |from catalog|import )", block.text, re.MULTILINE)
        assert block.language in RUN or not commands, f"{where}: commands in a block of {block.language or 'text'}"
        if block.language == "console":
            assert list(commands_of(block)), f"{where}: no command"


class Step(NamedTuple):
    """A command, where the page has it, and how lines begin that it prints: of a table the first, numbers differ."""

    where: str
    command: Command
    prints: tuple[str, ...]


class Script:
    """A page as one script of bash, which leaves each step's output and exit code in a file."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "steps"
        self._out.mkdir()
        self.steps: list[Step] = []
        self._lines: list[str] = []

    def add(self, block: Block) -> None:
        """Add a file, or the commands of a block."""
        if block.title:
            self._lines += [f"mkdir -p {shlex.quote(str(Path(block.title).parent))}", _write(block.title, block.text)]
            return
        for command in commands_of(block):
            out = shlex.quote(self._add(Step(f"line {block.line}: {command.text}", command, command.shown[:1])))
            # The newline ends a comment; a group, not a subshell, so that exports and folders last.
            self._lines += [f"{{ {command.text}\n}} >{out} 2>&1 </dev/null", f"echo $? >{out}.rc"]

    def add_programs(self, blocks: Iterable[Block]) -> None:
        """Add neighbouring blocks of Python, each a program."""
        words = ["python", str(PROGRAMS)]
        for block in blocks:
            program, shown = self._out / f"line_{block.line}.py", printed_by(block.text)
            program.write_text(block.text, encoding="utf-8")
            words += [str(program), self._add(Step(f"line {block.line}", Command(block.text, shown), shown))]
        self._lines.append(f"{shlex.join(words)} </dev/null")

    def _add(self, step: Step) -> str:
        """The file for the step's output."""
        self.steps.append(step)
        return str(self._out / str(len(self.steps) - 1))

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def result(self, step: int) -> tuple[int, str]:
        out = self._out / str(step)
        return int(out.with_suffix(".rc").read_text()), out.read_text(encoding="utf-8")


def _write(path: str, text: str) -> str:
    return f"cat >{shlex.quote(path)} <<'END OF FILE'\n{text}END OF FILE"


def pattern_of(line: str) -> str:
    """How a line begins: a terminal cuts it, numbers are another machine's, dots stand for what was left out."""
    parts = re.split(r"(\.\.\.|[\d.,:]*\d|\s+|-{3,})", line.strip())
    names = {"...": ".*", "-": "-+", " ": r"\s+"}
    return "".join(
        re.escape(part) if index % 2 == 0 else names.get(part[0] if part != "..." else part, r"[\d.,:]*\d")
        for index, part in enumerate(parts)
    )


@pytest.mark.parametrize("page", slow_but(QUICK, filter(blocks_to_run, PAGES)), ids=name_of)
def test_page_runs(page: Path, host_file: Path, tmp_path: Path) -> None:
    if page != README:  # which shows what a first command does; populating the host's arch takes two seconds
        shutil.copy(host_file, tmp_path / "catalog.db")
    script = Script(tmp_path)
    blocks = [block for block in blocks_to_run(page) if HERE[block.needs]()]
    for programs, neighbours in groupby(blocks, lambda block: block.language == "python" and not block.title):
        if programs:
            script.add_programs(neighbours)
        else:
            for block in neighbours:
                script.add(block)
    folder = tmp_path / "page"
    folder.mkdir()
    for name in ("data", "examples"):
        (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COLUMNS": "160",
        "CATALOG_DB": str(tmp_path / "catalog.db"),
        # Noise is not recorded: what is timed must not depend on what else runs.
        "CATALOG_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests" / "steady"), os.environ.get("PYTHONPATH")])),
    }
    if EMPTIES_THE_CACHE.search(script.text):
        environment["CATALOG_CACHE_DIR"] = str(tmp_path / "cache")  # all other tests share one
    subprocess.run(["bash", "-c", script.text], cwd=folder, env=environment, check=False, timeout=TIMEOUT_S)
    for number, step in enumerate(script.steps):
        code, output = script.result(number)
        assert (code != 0) == step.command.fails, f"{step.where}: exit code {code}\n{output}"
        lines = [line.strip() for line in output.splitlines()]
        for shown in step.prints:
            pattern = pattern_of(shown)
            assert any(re.match(pattern, line) for line in lines), f"{step.where}: {shown}\nprints\n{output}"


NEEDY = [
    pytest.param(block, id=f"{name_of(page)}:{block.line}")
    for page in PAGES
    for block in blocks_of(page)
    if block.needs is not None and (block.language in RUN or block.title)
]


@pytest.mark.parametrize("block", NEEDY)
def test_what_few_machines_can_run_would_be_understood(block: Block) -> None:
    if block.needs in TOOLS and not TOOLS[block.needs]():
        missing(block.needs)
    if block.language == "python":
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "catalog":
                module = import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name) or find_spec(f"{module.__name__}.{alias.name}"), alias.name
    elif block.language == "console":
        for command in commands_of(block):
            for program, *words in command.programs:
                if program == "catalog":
                    parsed(words)
                elif program == "make" and "-C" not in words:
                    assert set(words) <= TARGETS


@pytest.mark.slow
def test_the_site_is_built_of_every_page_without_a_dead_link(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None:
        missing("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if ROOT / "docs" in page.parents]
    for page in [*pages, *(Path("reference") / made for made in MADE)]:
        assert (site / (page.parent if page.name == "index" else page) / "index.html").is_file()
    for page, text in MADE.items():
        assert text in (site / "reference" / page / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in (site / "index.html").read_text(encoding="utf-8")
