"""Generate pages of the site from the program, and adapt links of the repository to the site.

Commands, settings, traits and tables are documented only in the program.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md", "data/parity/README.md")
"""Pages of the repository that are also pages of the site."""
EXAMPLES = "examples"
"""The folder whose programs are pages."""
HOME = {"README.md": "index.md", "LICENSE": "index.md"}
"""Files that have no page on the site, and the page that has their content."""

_LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
_NEEDS = re.compile(r"<!-- needs: (.+) -->")
_COMMANDS = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")
"""Short lists of commands, which are removed: each command has a chapter."""
_EXAMPLE = re.compile(r"^Example: (.+)$", re.MULTILINE)
_PYTHON = (
    (
        "The short way",
        (
            "catalog.runtime.catalog.Catalog",
            "catalog.ops.attention.problem.Problem",
            "catalog.runtime.plan.Plan",
            "catalog.runtime.bound.BoundPlan",
            "catalog.runtime.plan.Result",
        ),
    ),
    (
        "PyTorch",
        (
            "catalog.torch",
            "catalog.integrations.paged",
            "catalog.integrations.flashinfer",
            "catalog.integrations.xformers",
        ),
    ),
    ("Recording", ("catalog.runtime.tracing.trace", "catalog.runtime.traces")),
    ("Tuning and sets of problems", ("catalog.runtime.tune", "catalog.schema.shapes")),
    (
        "Timings of other projects",
        ("catalog.foreign.importing", "catalog.foreign.exporting", "catalog.foreign.parsed.Given"),
    ),
    ("Conformance", ("catalog.conformance.check",)),
    (
        "Backends",
        (
            "catalog.backends.Backend",
            "catalog.backends.GpuBackend",
            "catalog.build.targets.Target",
            "catalog.build.toolchains.Toolchain",
            "catalog.runtime.devices.gpu.runtime.GpuRuntime",
        ),
    ),
    (
        "Operations",
        (
            "catalog.ops.protocol.Operation",
            "catalog.ops.protocol.Extension",
            "catalog.ops.protocol.Family",
            "catalog.schema.traits.OpenWord",
            "catalog.schema.problem.Problem",
            "catalog.schema.problem_tensors.TensorForm",
            "catalog.schema.arguments.Arguments",
            "catalog.schema.traits.Traits",
            "catalog.runtime.tolerance.Tolerance",
        ),
    ),
    ("Errors", ("catalog.errors",)),
)
"""The chapters of the page of Python: modules, classes and functions."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those from elsewhere in the repository."""
    from mkdocs.structure.files import File, InclusionLevel

    made = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/traits.md": traits(),
        "reference/tables.md": tables(),
        "reference/python.md": python(),
    }
    made |= {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        name = path.relative_to(ROOT).with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=program(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show what a block needs, and point links of the repository to pages of the site."""
    here = page.file.src_uri
    of_docs = here not in PAGES
    folder = posixpath.dirname(posixpath.join(DOCS, here) if of_docs else here)

    def link(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if "://" in target:
            return match[0]
        there = posixpath.normpath(posixpath.join(folder, target))
        if there in HOME:
            there, anchor = HOME[there], ""
        elif there.startswith(f"{EXAMPLES}/"):
            there = there.replace(".py", ".md")
        there = there.removeprefix(f"{DOCS}/")
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    return _NEEDS.sub(r'<p class="needs">Needs \1.</p>', _LINK.sub(link, markdown))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: object) -> str:
    """The value as code; an empty string stays empty."""
    return f"`{value}`" if str(value) else ""


def program(path: Path) -> str:
    """The page of a program: what it shows, and its text."""
    text = path.read_text(encoding="utf-8")
    about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return f"# {path.name}\n\n{about}\n\n```python\n{text}```\n"


def commands() -> str:
    """Every command with its arguments and options, as in its help."""
    import typer
    from typer.cli import get_docs_for_click

    from catalog.cli.main import app

    program = typer.main.get_command(app)
    context = program.make_context("catalog", [], resilient_parsing=True)
    text = get_docs_for_click(obj=program, ctx=cast("typer.Context", context), name="catalog", title="Commands")
    return _EXAMPLE.sub(r"    $ \1", _COMMANDS.sub("", text))


def settings() -> str:
    """Every setting: variable, default, meaning."""
    from catalog.settings import Settings

    rows = []
    for name, field in Settings.model_fields.items():
        default = field.get_default()
        rows.append((code(f"CATALOG_{name.upper()}"), code("" if default is None else default), field.description))
    about = (
        "Environment variables, which a process reads once; an empty one counts as unset. `catalog doctor` shows those "
        "of your machine."
    )
    return f"# Settings\n\n{about}\n\n{table(('variable', 'default', 'meaning'), rows)}\n"


def traits() -> str:
    """Every column of a kernel: what it computes, how, and the rest."""
    from catalog.ops import operation
    from catalog.ops.attention.traits import TRAITS
    from catalog.schema.columns import columns_of

    groups: Mapping[str, str] = {
        "signature": "What a kernel computes. Kernels with the same signature answer the same problems.",
        "algorithm": "How it computes it: the choices of tuning.",
    }
    text = [
        "# Traits",
        "A kernel is its arch, its signature and its algorithm. Every trait is a column: `catalog query` takes any SQL "
        "expression over them, and `catalog columns` lists them in the terminal.",
    ]
    columns = tuple(columns_of(operation()))
    for group, about in groups.items():
        named = {name for name, trait in TRAITS.items() if trait.group == group}
        rows = [(code(c.name), c.domain, code(c.default), c.meaning) for c in columns if c.name in named]
        text += [f"## {group.capitalize()}", about, table(("trait", "domain", "default", "meaning"), rows)]
    others = [(code(c.name), c.domain, c.meaning) for c in columns if c.name not in TRAITS]
    text += ["## Other columns", table(("column", "domain", "meaning"), others)]
    text += [
        "## Identity",
        "Arch, revision, space, mask implementation, target and traits identify a kernel; its `id` is their SHA-256. "
        f"Traits that came later ({', '.join(map(code, TRAITS.later))}) do not count at their default, so that "
        "ids stay.",
    ]
    return "\n\n".join(text) + "\n"


def tables() -> str:
    """Every table of the catalog's file."""
    from catalog.ops import operation
    from catalog.registry.tables import tables_of

    text = [
        "# Tables",
        "A catalog is one SQLite file, open to every program that reads SQLite "
        "([Datasette](../how-to/reports.md), pandas, `sqlite3`). Write to it only through the catalog.",
    ]
    for name, described in tables_of(operation()).items():
        rows = [(code(column), meaning) for column, meaning in described.columns.items()]
        text += [f"## {name}", described.about, table(("column", "meaning"), rows)]
    return "\n\n".join(text) + "\n"


def python() -> str:
    """The classes and functions that programs use, by their docstrings."""
    about = "`catalog` has `Catalog`, `Problem`, `CatalogError` and `trace`; the rest is imported from its module. "
    about += "Where a function takes a path, it may be text, a `Path` or any other `os.PathLike`."
    text = ["# Python", about]
    for chapter, things in _PYTHON:
        text += [f"## {chapter}", *(f"::: {thing}" for thing in things)]
    return "\n\n".join(text) + "\n"
