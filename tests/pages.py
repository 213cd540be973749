"""The pages that users read, as the blocks that they would run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_NEEDS = re.compile(r"<!-- needs: (.+) -->")
_TITLE = re.compile(r'title="([^"]+)"')
_BETWEEN = {"|", "||", "&&", ";", "&"}
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\w+=")


@dataclass(frozen=True)
class Block:
    """A fence: its language, its file's name where it is a file, and what a machine needs to run it."""

    language: str
    title: str | None
    needs: str | None
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A shell command and the lines of output that the page shows."""

    text: str
    shown: tuple[str, ...]

    @property
    def fails(self) -> bool:
        return bool(self.shown) and self.shown[0].startswith("Error:")

    @property
    def programs(self) -> list[list[str]]:
        """The words of each program of a pipe or a list, without assignments before it."""
        words = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        found: list[list[str]] = [[]]
        for word in words:
            if word in _BETWEEN:
                found.append([])
            elif found[-1] or not _ASSIGNMENT.match(word):
                found[-1].append(word)
        return [program for program in found if program]


def blocks_of(page: Path) -> Iterator[Block]:
    needs = None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (note := _NEEDS.search(token.content)):
            needs = note[1]
        elif token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = _TITLE.search(rest)
            yield Block(language, title and title[1], needs, token.content, token.map[0] + 1)
            needs = None
        elif token.type == "code_block":
            yield Block("", None, None, token.content, token.map[0] + 1)


def printed_by(program: str) -> tuple[str, ...]:
    """What the comments behind calls of print say that they print."""
    return tuple(_PRINTED.findall(program))


def commands_of(block: Block) -> Iterator[Command]:
    text, shown = "", []
    for line in block.text.splitlines():
        if text.endswith("\\"):
            text += f"\n{line}"
        elif line.startswith("$ "):
            if text:
                yield Command(text, tuple(shown))
            text, shown = line[2:], []
        elif line:
            shown.append(line)
    if text:
        yield Command(text, tuple(shown))
