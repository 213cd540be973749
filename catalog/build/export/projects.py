"""Build files for the units of an export: CMake, make and ninja, each with its own progress display.

Names of units are C identifiers and need no escaping. Paths may contain blanks, quotes and dollars: they are values of
variables, escaped for each format, and quoted for the shell where they are used.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from catalog.build.export.toolset import PlacedFlag, Toolset
from catalog.errors import UsageError
from catalog.messages import did_you_mean, either

UNITS = "kernels"
"""Folder with the translation units."""

_OBJECTS = "objects.txt"
"""The linker's list of objects: thousands of them do not fit on a command line."""


class ProjectFormat(str, Enum):
    """A build tool."""

    CMAKE = "cmake"
    MAKE = "make"
    NINJA = "ninja"


@dataclass(frozen=True)
class Project:
    """A library made from ``units``, the stems of the files in ``kernels/``, and the table ``PREFIX_register.cpp``.

    ``include_dirs`` are searched after the folder's own ``include/``; each is a variable of the build file, by name.
    """

    prefix: str
    units: Sequence[str]
    toolset: Toolset
    include_dirs: Mapping[str, Path]

    @property
    def output(self) -> str:
        """File name of the library."""
        return f"lib{self.prefix}.so"

    @property
    def variables(self) -> dict[str, str]:
        """Paths of this machine, by variable.

        Raises:
            UsageError: a path has a line break, which no build file can hold.
        """
        variables = {name: str(path) for name, path in {**self.include_dirs, **self.toolset.variables}.items()}
        for path in variables.values():
            if "\n" in path or "\r" in path:
                raise UsageError(f"{path!r}: no build file can hold a path with a line break")
        return variables

    @property
    def placed_compile_flags(self) -> tuple[PlacedFlag, ...]:
        """Flags that contain a variable, include folders among them."""
        return (*(PlacedFlag("-I", name) for name in self.include_dirs), *self.toolset.placed_compile_flags)

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """Flags for compiling each source."""
        return (*self.toolset.driver_flags, *self.toolset.compile_flags)

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Flags for linking."""
        return (*self.toolset.driver_flags, *self.toolset.link_flags)

    @property
    def sources(self) -> list[str]:
        """Every source file without its suffix; the table is last."""
        return [*(f"{UNITS}/{unit}" for unit in self.units), f"{self.prefix}_register"]


def project_files(project: Project, form: ProjectFormat) -> dict[str, str]:
    """The build files of ``project``: texts by name.

    Raises:
            UsageError: no build file can hold a path.
    """
    return _WRITERS[form](project)


def _object(source: str) -> str:
    return f"obj/{source}.o"


def _objects(project: Project) -> str:
    return "".join(f"{_object(source)}\n" for source in project.sources)


def _single_quoted(path: str) -> str:
    """``path`` for use between single quotes in a shell."""
    return path.replace("'", "'\\''")


def _placed(flags: Sequence[PlacedFlag], variable: str) -> str:
    """``flags`` for the shell; ``variable`` is the form of a variable reference, such as ``$({})``."""
    return " ".join(f"'{flag.of(variable.format(flag.variable))}'" for flag in flags)


# ninja

_NINJA_VARIABLE = "${{{}}}"


def _ninja(project: Project) -> dict[str, str]:
    from ninja import Writer, escape

    text, compiler = io.StringIO(), project.toolset.compiler_variable
    # Its stub asks for a str although it writes to a file; its line wrapping would lose blanks in paths.
    write = Writer(cast("Any", text), width=2**31)
    write.comment(f"{project.output}: ninja. {compiler}, CXXFLAGS and LDFLAGS are taken from the environment.")
    write.variable("ninja_required_version", "1.5")
    write.variable(compiler, escape(f"${{{compiler}:-{project.toolset.compiler}}}"))
    for name, path in project.variables.items():
        write.variable(name, escape(_single_quoted(path)))
    write.variable("FLAGS", escape(shlex.join(project.compile_flags)))
    write.variable("INCLUDES", ["-Iinclude", _placed(project.placed_compile_flags, _NINJA_VARIABLE)])
    write.variable("LINK_FLAGS", escape(shlex.join(project.link_flags)))
    write.variable("LINK_PLACES", _placed(project.toolset.placed_link_flags, _NINJA_VARIABLE))
    write.newline()
    compile_command = f"${compiler} $FLAGS $INCLUDES $$CXXFLAGS -MMD -MF $out.d -c $in -o $out"
    write.rule("compile", compile_command, description="compile $in", depfile="$out.d", deps="gcc")
    write.rule(
        "link",
        f"${compiler} {project.toolset.objects_option}{_OBJECTS} $LINK_FLAGS $LINK_PLACES $$LDFLAGS -o $out",
        description="link $out",
    )
    write.newline()
    for source in project.sources:
        write.build([_object(source)], "compile", [f"{source}.cpp"])
    write.build([project.output], "link", [_object(source) for source in project.sources], implicit=[_OBJECTS])
    write.default(project.output)
    return {"build.ninja": text.getvalue(), _OBJECTS: _objects(project)}


# make

_MAKEFILE = """\
# {library}: make -j8. V=1 shows the commands; {variable}, CXXFLAGS and LDFLAGS are yours to set.
include flags.mk

LIBRARY := {library}
SOURCES := \\
{sources}
OBJECTS := $(SOURCES:%=obj/%.o)
Q := $(if $(filter 1,$(V)),,@)

.PHONY: all clean
.DELETE_ON_ERROR:

all: $(LIBRARY)

$(LIBRARY): $(OBJECTS) {objects} flags.mk
\t@echo "link $@"
\t$(Q)$({variable}) {objects_option}{objects} $(LINK_FLAGS) $(LDFLAGS) -o $@

$(OBJECTS): obj/%.o: %.cpp flags.mk
\t@mkdir -p $(@D)
\t@echo "[$(NUMBER)/{count}] $*"
\t$(Q)$({variable}) $(FLAGS) $(INCLUDES) $(CXXFLAGS) -MMD -MP -c $< -o $@

clean:
\trm -rf obj $(LIBRARY)

{numbers}

-include $(OBJECTS:.o=.d)
"""

_FLAGS_MK = """\
# What every object depends on: a change here compiles all of them again.
ifneq ($(filter default undefined,$(origin {variable})),)
{variable} := {compiler}
endif
{variables}
FLAGS := {flags}
INCLUDES := -Iinclude {places}
LINK_FLAGS := {link_flags} {link_places}
"""


def _make(project: Project) -> dict[str, str]:
    toolset = project.toolset
    makefile = _MAKEFILE.format(
        library=project.output,
        variable=toolset.compiler_variable,
        sources=" \\\n".join(f"    {source}" for source in project.sources),
        objects=_OBJECTS,
        objects_option=toolset.objects_option,
        count=len(project.sources),
        numbers="\n".join(f"{_object(source)}: NUMBER := {number}" for number, source in enumerate(project.sources, 1)),
    )
    flags = _FLAGS_MK.format(
        variable=toolset.compiler_variable,
        compiler=_make_escaped(toolset.compiler),
        variables="\n".join(
            f"{name} ?= {_make_escaped(_single_quoted(path))}" for name, path in project.variables.items()
        ),
        flags=_make_escaped(shlex.join(project.compile_flags)),
        places=_placed(project.placed_compile_flags, "$({})"),
        link_flags=_make_escaped(shlex.join(project.link_flags)),
        link_places=_placed(toolset.placed_link_flags, "$({})"),
    )
    return {"Makefile": makefile, "flags.mk": flags, _OBJECTS: _objects(project)}


def _make_escaped(text: str) -> str:
    return text.replace("$", "$$").replace("#", "\\#")


# CMake

_CMAKE = """\
# {library}: cmake -S . -B build && cmake --build build -j8. CMAKE_CXX_COMPILER compiles, or what {variable} names.
cmake_minimum_required(VERSION 3.16)
if(NOT DEFINED ENV{{{variable}}})
  set(ENV{{{variable}}} {compiler})
endif()
set(ENV{{CXX}} "$ENV{{{variable}}}")
{driver}project({prefix}_kernels LANGUAGES CXX)
set(CMAKE_CXX_RESPONSE_FILE_LINK_FLAG {objects_option})

{variables}
add_library({prefix}_kernels SHARED
{sources})
set_target_properties({prefix}_kernels PROPERTIES PREFIX lib OUTPUT_NAME {prefix} SUFFIX .so)
target_include_directories({prefix}_kernels PRIVATE include)
target_compile_options({prefix}_kernels PRIVATE
{compile})
target_link_options({prefix}_kernels PRIVATE
{link})
{libraries}"""


def _cmake(project: Project) -> dict[str, str]:
    toolset = project.toolset
    libraries = [flag for flag in toolset.link_flags if flag.startswith("-l")]
    options = [flag for flag in toolset.link_flags if flag not in libraries]
    text = _CMAKE.format(
        library=project.output,
        variable=toolset.compiler_variable,
        prefix=project.prefix,
        compiler=_bracketed(toolset.compiler),
        driver=f"set(CMAKE_CXX_FLAGS_INIT {_bracketed(shlex.join(toolset.driver_flags))})\n"
        if toolset.driver_flags
        else "",
        objects_option=_bracketed(toolset.objects_option),
        variables="".join(
            f"if(NOT DEFINED {name})\n  set({name} {_bracketed(path)})\nendif()\n"
            for name, path in project.variables.items()
        ),
        sources="\n".join(f"  {source}.cpp" for source in project.sources),
        compile=_cmake_options(toolset.compile_flags, project.placed_compile_flags),
        link=_cmake_options(options, toolset.placed_link_flags),
        libraries=f"target_link_libraries({project.prefix}_kernels PRIVATE {' '.join(libraries)})\n"
        if libraries
        else "",
    )
    return {"CMakeLists.txt": text}


def _cmake_options(flags: Sequence[str], placed: Sequence[PlacedFlag]) -> str:
    # SHELL: keeps CMake from removing repeated options, such as -mllvm.
    lines = [_bracketed(f"SHELL:{shlex.join(flags)}")] if flags else []
    lines += [f'"{flag.of(f"${{{flag.variable}}}")}"' for flag in placed]
    return "\n".join(f"  {line}" for line in lines)


def _bracketed(text: str) -> str:
    """``text`` as a CMake argument in which nothing is substituted."""
    equals = "="
    while f"]{equals}]" in text:
        equals += "="
    return f"[{equals}[{text}]{equals}]"


_WRITERS: Mapping[ProjectFormat, Callable[[Project], dict[str, str]]] = MappingProxyType(
    {ProjectFormat.CMAKE: _cmake, ProjectFormat.MAKE: _make, ProjectFormat.NINJA: _ninja}
)


def read_format(name: str) -> ProjectFormat:
    """The format called ``name``.

    Raises:
        UsageError: there is no such format.
    """
    try:
        return ProjectFormat(name)
    except ValueError:
        known = [form.value for form in ProjectFormat]
        meant = did_you_mean(name, known)
        raise UsageError(f"--format {name} is not allowed{meant}", hint=f"Allowed: {either(known)}.") from None


def how_to_build(form: ProjectFormat, folder: Path) -> str:
    """The shell command that builds the contents of ``folder``."""
    where, build, jobs = shlex.quote(str(folder)), shlex.quote(str(folder / "build")), os.cpu_count() or 1
    return {
        ProjectFormat.CMAKE: f"cmake -S {where} -B {build} && cmake --build {build} -j{jobs}",
        ProjectFormat.MAKE: f"make -C {where} -j{jobs}",
        ProjectFormat.NINJA: f"ninja -C {where}",
    }[form]
