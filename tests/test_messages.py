"""What the command line says when something is wrong, as a user reads it."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from catalog import errors
from catalog.__main__ import main
from catalog.messages import counted, did_you_mean, either, expected, subject
from catalog.settings import settings

PACKAGE = Path(errors.__file__).parent
ALLOWED = "Hint: Allowed: table, json, jsonl or csv."
PROBLEM = "--batch 1 --nhead-q 8 --seqlen-q 8 --hdim-q 64"


@pytest.fixture(scope="module")
def place(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a catalog of sm_90, an empty cache, and files that are wrong in a way each."""
    folder = tmp_path_factory.mktemp("messages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CATALOG_DB", "catalog.db")
        patch.setenv("CATALOG_CACHE_DIR", "cache")
        patch.chdir(folder)
        settings.cache_clear()
        shutil.copy(populated("sm_90"), "catalog.db")
        for name, text in {
            "text.db": "hello, this is text\n" * 9,
            "not.bundle": "hello",
            "bad.yaml": "about: x\ngrids:\n- name: chat\n  category: x\n  fixd: {hdim_q: 64}\n",
            "empty.jsonl": "",
            "bad.jsonl": '{"format": 1, "at": 3}\n',
            "sweep.json": '{"variant": "fwdd"}',
        }.items():
            (folder / name).write_text(text)
        yield folder
    settings.cache_clear()


@pytest.fixture
def outcome(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The exit code and stderr of a command."""

    def run(words: str, **variables: str) -> tuple[int, str]:
        for name, value in {"CATALOG_DB": "catalog.db", "CATALOG_CACHE_DIR": "cache", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(place)
        monkeypatch.setattr("sys.argv", ["catalog", *shlex.split(words)])
        settings.cache_clear()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return code, capsys.readouterr().err.rstrip("\n")

    return run


PROVOKED = {
    "columns --format jsn": (2, f"Error: --format jsn is not allowed; did you mean json?\n{ALLOWED}"),
    "columns --format xml": (2, f"Error: --format xml is not allowed\n{ALLOWED}"),
    "query pipelin=1": (
        2,
        "Error: expression: no such column: pipelin\n    pipelin=1\n    ^^^^^^^\nHint: Did you mean pipeline?",
    ),
    "query 1 --columns name,hdimq": (
        2,
        "Error: columns: no such column: 'hdimq'\nHint: Did you mean hdim_q?",
    ),
    "query 1 --limit -1": (2, "Error: limit: -1 is negative"),
    "query \"dtype='fp61'\"": (0, "Hint: dtype has no value 'fp61'; did you mean fp16?"),
    "query hdim_q=129": (0, "No kernel meets the expression."),
    "query hdim_q=129 --count": (0, ""),
    "query 1 --arch gfx942": (
        2,
        "Error: catalog.db has no kernels of gfx942, but of sm_90\nHint: Add them: catalog populate --arch gfx942",
    ),
    "query 1 --arch sm90": (
        2,
        "Error: no arch is called 'sm90'; did you mean sm_90?\n"
        "Hint: The catalog has sm_90; `catalog doctor` lists all archs.",
    ),
    "populate --arch sm_90 --space rulez": (
        2,
        "Error: sm_90 has no space 'rulez'\nHint: Archs with sweeps: gfx1100, gfx1201, gfx90a, gfx942, gfx950.",
    ),
    "populate --arch gfx942 --space rulez": (
        2,
        "Error: no space is called 'rulez'\nHint: There are: ck, rules, exhaustive.",
    ),
    "populate --arch sm_90 --revision x": (2, "Error: sm_90 has no revision 'x'\nHint: There are: native."),
    "populate --arch gfx942 --receipt 999": (2, r"Error: gfx942 has no receipt '999'\nHint: There are: 0, .*\."),
    "populate --arch sm_90 --config none.json": (2, "Error: none.json: cannot be read: No such file or directory"),
    "populate --arch gfx942 --space rules --config sweep.json": (
        2,
        "Error: sweep.json: variant: no variant is called 'fwdd'; did you mean fwd?\n"
        "Hint: There are: fwd, splitkv, pagedkv, appendkv, batch_prefill, bwd.",
    ),
    "build hdim_q=129 --arch sm_90": (0, r"No kernel of sm_90 meets the expression\.\n.*"),
    """--db other.db build "family='fwd_splitkv_combine' AND dtype='fp8'" --arch gfx1100""": (
        0,
        r"Left out: 18 kernels of gfx1100 that the hardware cannot run, or that are known to be wrong .*\n"
        r"Hint: `catalog rules --arch gfx1100 --kind hardware` says why\..*",
    ),
    "fallback --arch sm_90": (2, "Error: sm_90 is not an AMD arch\nHint: For example: catalog fallback --arch gfx942"),
    f"select {PROBLEM} --dtype fp61": (
        2,
        r"Error: dtype='fp61' is not allowed; did you mean fp16\?\nHint: Allowed: fp32, .*\.",
    ),
    f"select {PROBLEM} --page-size 16": (
        2,
        "Error: page_size=16 does not apply to op='fwd'\n"
        "Hint: Ops that take page_size: splitkv, pagedkv, appendkv, batch_prefill.",
    ),
    "explain": (
        2,
        r"Error: there is nothing to explain\nHint: Give traits, as in family=fwd, or a problem by its options\.",
    ),
    "explain familly=fwd": (
        2,
        "Error: no trait is called 'familly'; did you mean family?\nHint: `catalog columns` lists every trait.",
    ),
    "explain arch=sm_90": (2, "Error: arch is not a trait\nHint: Use its option: --arch, --revision or --mask-impl."),
    "rules --kind constrant": (
        2,
        r"Error: no rule has the kind 'constrant'; did you mean constraint\?\nHint: Kinds: .*",
    ),
    "shapes smok": (
        2,
        "Error: no set of shapes is called 'smok'; did you mean smoke?\n"
        "Hint: There are: conv-full, conv-smoke, full, gemm-full, gemm-smoke, nightly, smoke; "
        "a file of your own is a path that ends in .yaml.",
    ),
    "shapes bad.yaml": (
        2,
        "Error: bad.yaml: grid 'chat': fixd: unknown field; allowed: name, about, category, fixed, vary, together; "
        "did you mean fixed?",
    ),
    "tune": (
        2,
        "Error: give exactly one of: the options of a problem, --shapes SET, --misses, --trace FILE\n"
        "Hint: For example: catalog tune --shapes smoke",
    ),
    "replay empty.jsonl": (2, "Error: empty.jsonl: the file contains no calls"),
    "replay bad.jsonl": (2, r"Error: bad\.jsonl: line 1: \w+: (expected|missing).*"),
    "cache gc --max-size abc": (
        2,
        "Error: 'abc' is not a size\nHint: Sizes are numbers with K, M, G or T, such as 500M or 2G.",
    ),
    "cache export none.bundle --where hdim_q=129": (2, "Error: no kernel meets 'hdim_q=129': nothing to export"),
    **{
        f"cache import {option}not.bundle": (
            1,
            "Error: not.bundle is not a bundle, or is damaged\nHint: Copy or export it again.",
        )
        for option in ("", "--trust ")
    },
    "merge none.db": (1, "Error: there is no catalog at none.db"),
    "merge text.db": (
        1,
        "Error: text.db cannot be merged: file is not a database\n"
        "Hint: Nothing was changed. To inspect it: catalog --db text.db doctor",
    ),
}


@pytest.mark.parametrize("words", PROVOKED)
def test_a_mistake_is_reported_with_this_message(outcome: Callable[..., tuple[int, str]], words: str) -> None:
    code, text = PROVOKED[words]
    found = outcome(words)
    assert found[0] == code, found
    assert found[1] == text or re.fullmatch(text, found[1], re.DOTALL), found[1]


SETTINGS = {
    "CATALOG_COMPILE": ("maybe", "expected true or false"),
    "CATALOG_QUERY_TIMEOUT": ("-1", "must be above 0"),
    "CATALOG_NUM_THREADS": ("many", "expected an integer"),
    "CATALOG_GUARD": ("often", "expected 'first_run' or 'never'"),
    "CATALOG_HIPCXX_DEVICE": ("zig 'c++", "No closing quotation"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_reported_with_its_meaning(outcome: Callable[..., tuple[int, str]], name: str) -> None:
    value, wrong = SETTINGS[name]
    code, text = outcome("query", **{name: value})
    assert (code, text.splitlines()[0]) == (2, f"Error: {name}={value!r}: {wrong}")
    assert text.splitlines()[1].startswith("Hint: It sets: ")


def test_counts_lists_and_near_words() -> None:
    assert [counted(n, "kernel") for n in (0, 1, 2345)] == ["0 kernels", "1 kernel", "2,345 kernels"]
    assert [counted(n, "new library") for n in (1, 2)] == ["1 new library", "2 new libraries"]
    assert [subject(n, "family") for n in (1, 2)] == ["1 family is", "2 families are"]
    assert [either(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]
    assert did_you_mean("HDIM", ["hdim_q", "mask"]) == "; did you mean hdim_q?"
    assert did_you_mean("x", ["hdim_q", "mask"]) == ""


def test_no_word_of_pydantics_own_reaches_a_message() -> None:
    class Model(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        whole: int = Field(ge=1)
        part: float
        flag: bool
        text: str
        many: list[int]
        inner: dict[str, int]
        gone: int

    with pytest.raises(ValidationError) as caught:
        Model.model_validate(
            {"whole": 0, "part": "x", "flag": 3, "text": 1, "many": 1, "inner": 1, "other": 1}  # and gone is missing
        )
    found = {str(failure["loc"][0]): expected(failure) for failure in caught.value.errors()}
    assert found == {
        "whole": "must be at least 1",
        "part": "expected a number",
        "flag": "expected true or false",
        "text": "expected text",
        "many": "expected a list",
        "inner": "expected an object",
        "gone": "missing",
        "other": "unknown field",
    }


COMMANDS = ("catalog ", "chmod ", "dask ", "nvcc ", "pip ")


def _ends(node: ast.expr) -> tuple[str, str]:
    """The first characters of a literal and its last one; empty where they are computed."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    first, last = (part.value if isinstance(part, ast.Constant) else "" for part in (parts[0], parts[-1]))
    return str(first)[:2], str(last)[-1:]


def _errors() -> Iterator[tuple[str, ast.Call]]:
    """Every place where an error of the catalog is made."""
    known = {name for name, made in vars(errors).items() if isinstance(made, type)}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known and node.args:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_messages_begin_in_lower_case_and_hints_are_sentences() -> None:
    wrong: list[Any] = []
    for place, call in _errors():
        first, last = _ends(call.args[0])
        if re.match(r"[A-Z][a-z]", first) or last == ".":
            wrong.append((place, ast.unparse(call.args[0])))
        for hint in (keyword.value for keyword in call.keywords if keyword.arg == "hint"):
            if re.match(r"[a-z]", _ends(hint)[0]) and not ast.unparse(hint).lstrip("f'\"").startswith(COMMANDS):
                wrong.append((place, ast.unparse(hint)))
    assert not wrong
