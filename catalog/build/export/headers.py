"""What a generated header states about its kernel: its name and its launcher.

Read from the text in the form that upstream's generators write; nothing is compiled, all preprocessor branches count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.[^'\n]*|[^'\\\n])')
    |(?P<end>[{};])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_NAMESPACE = re.compile(r"(?:inline )?namespace(?: ((?:\w+|::)+))?")
_TRANSPARENT = re.compile(r'extern "C(?:\+\+)?"')
_NAME = re.compile(r'\b\w*KERNEL_NAME ?(?:\[ ?\] ?)?= ?"((?:\\.|[^"\\])*)"')
_NAME_MACRO = re.compile(r'\s*#\s*define\s+\w*KERNEL_NAME\s+"((?:\\.|[^"\\])*)"')
_TYPE = re.compile(r"(?P<defined>struct|class) (?P<type>\w+)(?: final)?(?: ?:.*)?|using (?P<alias>\w+) ?=.*")
_FUNCTION = re.compile(r"(?:(?:inline|static) )*(?:float|void) (run|launch) ?\(.*")
_SELECTED = re.compile(r"SelectedKernel|Selected\w*Launcher")
_PER_KERNEL = re.compile(r"Kernel_(\w+)|(\w+)_Launcher")
_HIP_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](?:example/)?(?:ck_tile|hip)/', re.MULTILINE)
_OWN_NAMESPACE = re.compile(r"ns_(\w+)")


@dataclass(frozen=True)
class GeneratedHeader:
    """The kernel of a header.

    ``name`` is None if the header does not state it. ``type`` is the qualified name of the type with the static member
    function ``launch``, ``function`` that of a free function; at most one is set. ``global_types`` are types that all
    headers of this kind define in the global namespace, under the same names. ``needs_hip`` is true if it includes
    headers of CK or HIP.
    """

    name: str | None
    type: str | None
    function: str | None
    global_types: tuple[str, ...]
    needs_hip: bool


@dataclass(frozen=True)
class _Statement:
    """A declaration at namespace scope, with single blanks; ``defines`` if a body follows."""

    scope: tuple[str, ...]
    text: str
    defines: bool

    def qualified(self, name: str) -> str:
        return "::".join(("", *self.scope, name))


def read_header(text: str) -> GeneratedHeader:
    """What ``text`` states about its kernel.

    The name is, in this order: the string of a constant or macro ``KERNEL_NAME`` or ``..._KERNEL_NAME``; NAME of the
    first namespace ``ns_NAME``; NAME of the first type ``Kernel_NAME`` or ``NAME_Launcher``. The launcher is the first
    of: ``SelectedKernel`` or ``Selected...Launcher``, struct or alias; in a namespace, the only function ``run``, or
    else the only ``launch``, that returns float or void; a struct ``Kernel_NAME`` or ``NAME_Launcher``.
    """
    statements = list(_statements(text))
    types = [(found, at) for at in statements if (found := _type(at)) is not None]
    selected = [at.qualified(name) for name, at in types if _SELECTED.fullmatch(name)]
    own = [(name, at) for name, at in types if _PER_KERNEL.fullmatch(name) and not _SELECTED.fullmatch(name)]
    function = None if selected else _function(statements)
    type_ = next(iter(selected), None)
    if type_ is None and function is None:
        type_ = next((at.qualified(name) for name, at in own), None)
    return GeneratedHeader(
        name=_name(text, statements, [name for name, _ in own]),
        type=type_,
        function=function,
        global_types=tuple(name for name, at in types if _SELECTED.fullmatch(name) and at.defines and at.scope == ()),
        needs_hip=_HIP_INCLUDE.search(text) is not None,
    )


def _name(text: str, statements: list[_Statement], own: list[str]) -> str | None:
    for at in statements:
        if found := _NAME.search(at.text):
            return _unescaped(found[1])
    for token in _TOKEN.finditer(text):
        if token["directive"] and (found := _NAME_MACRO.match(token["directive"])):
            return _unescaped(found[1])
    for at in statements:
        for part in at.scope:
            if found := _OWN_NAMESPACE.fullmatch(part):
                return found[1]
    for name in own:
        if found := _PER_KERNEL.fullmatch(name):
            return found[1] or found[2]
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _type(statement: _Statement) -> str | None:
    found = _TYPE.fullmatch(statement.text)
    if found is None or (found["defined"] and not statement.defines):
        return None
    return found["type"] or found["alias"]


def _function(statements: list[_Statement]) -> str | None:
    functions = [
        (found[1], at) for at in statements if at.scope and at.defines and (found := _FUNCTION.fullmatch(at.text))
    ]
    for wanted in ("run", "launch"):
        named = [at.qualified(name) for name, at in functions if name == wanted]
        if len(named) == 1:
            return named[0]
    return None


def _statements(text: str) -> Iterator[_Statement]:
    scopes: list[tuple[str, ...] | None] = []  # of open braces; None for a body, whose contents are skipped
    words = ""
    last = 0
    for token in _TOKEN.finditer(text):
        words += text[last : token.start()]
        last = token.end()
        if token["string"]:
            words += token["string"]
        if not token["end"]:
            words += " "
            continue
        statement, words = " ".join(words.split()), ""
        if token["end"] == "}":
            scopes = scopes[:-1]
            continue
        readable = None not in scopes
        scope = tuple(part for parts in scopes for part in parts or ())
        if readable and statement:
            yield _Statement(scope, statement, token["end"] == "{")
        if token["end"] == "{":
            scopes.append(_opened(statement) if readable else None)


def _opened(statement: str) -> tuple[str, ...] | None:
    """The namespaces that ``statement`` opens; None for a body."""
    if _TRANSPARENT.fullmatch(statement):
        return ()
    found = _NAMESPACE.fullmatch(statement)
    if found is None:
        return None
    return tuple(part for part in (found[1] or "").split("::") if part)
