"""The words of the project: comments, strings, pages and data avoid the phrases that ``english.yaml`` lists."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow  # it is a part of `make lint`

ROOT = Path(__file__).parent.parent
PHRASES = Path(__file__).with_name("english.yaml")
FOLDERS = ("catalog", "data", "docs", "examples", "benchmarks", "tests")
CODE = "\0"
"""Stands for a character of code, so that no phrase is found across it."""
C_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
PROSE = {".md", ".json", ".yaml", ".yml", ".jinja", ".sql"}
"""Files that are searched whole."""


def spaces_for(marks: str, text: str) -> str:
    return re.sub(f"[{marks}]", " ", text)


def text_of_python(source: str) -> str:
    """Comments and strings at their places; everything else is blanked out."""
    lines = source.splitlines(keepends=True)
    kept = [re.sub(r"\S", CODE, line) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING") or kind.startswith("FSTRING"):
            (first, start), (last, end) = token.start, token.end
            for row in range(first - 1, last):
                begin, stop = start if row == first - 1 else 0, end if row == last - 1 else len(lines[row])
                kept[row] = kept[row][:begin] + spaces_for("#\"'", lines[row][begin:stop]) + kept[row][stop:]
    return "".join(kept)


def text_of_c(source: str) -> str:
    """Comments and strings at their places; everything else is blanked out."""
    text, end = [], 0
    for match in C_TEXT.finditer(source):
        text += [re.sub(r"\S", CODE, source[end : match.start()]), spaces_for('/*"', match[0])]
        end = match.end()
    return "".join([*text, re.sub(r"\S", CODE, source[end:])])


READERS = {
    **dict.fromkeys(PROSE, str),
    ".py": text_of_python,
    **dict.fromkeys((".hpp", ".h", ".cpp", ".c"), text_of_c),
}


@cache
def texts() -> dict[Path, str]:
    """What people read in each file of the repository, by its path."""
    files = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
    return {
        path.relative_to(ROOT): READERS[path.suffix](path.read_text(encoding="utf-8"))
        for path in sorted(files)
        if path.suffix in READERS and path != PHRASES
    }


@pytest.mark.parametrize("phrase", yaml.safe_load(PHRASES.read_text("utf-8")), ids=lambda phrase: phrase["pattern"])
def test_no_text_has_this_phrase(phrase: dict[str, str]) -> None:
    pattern = re.compile(phrase["pattern"].replace(" ", r"\s+"), re.IGNORECASE)
    found = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r}"
        for path, text in texts().items()
        for match in pattern.finditer(text)
    ]
    if found:
        pytest.fail("\n".join([f"write instead: {phrase['write']}", *found]), pytrace=False)
