"""Commands that take a problem: an optional operation, and an option for each field of its problems.

The options are created when a command is parsed or its help is shown, because importing a problem class is too slow
for ``catalog --help``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic import BaseModel

    from catalog.schema.fields import Described
    from catalog.schema.problem import Problem

_STATED = f"{__name__}.stated"


@dataclass(frozen=True)
class StatedProblem:
    """The problem stated on the command line; ``fields`` holds the fields whose options are given, if any."""

    operation: str | None
    fields: Mapping[str, Any]

    def __bool__(self) -> bool:
        return bool(self.fields)

    def problem(self) -> Problem:
        """The problem.

        Raises:
            ProblemError: a field is missing or has an invalid value.
        """
        return _problem_type(self.operation)(**self.fields)


def stated_problem(context: typer.Context) -> StatedProblem:
    """The problem stated in the call of a :class:`ProblemCommand`."""
    return cast("StatedProblem", context.meta[_STATED])


class ProblemCommand(TyperCommand):
    """A command with an optional first word, the operation, and the options of its problems."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the operation, then the options; :func:`stated_problem` returns those of the problem."""
        named = self._names_operation(args)
        operation = args[0] if named else None
        ctx.meta[_STATED] = StatedProblem(operation, {})
        rest = super().parse_args(ctx, args[named:])
        stated = {name: ctx.params.pop(name) for name in _problem_type(operation).model_fields}
        given = {name: value for name, value in stated.items() if value is not None}
        ctx.meta[_STATED] = StatedProblem(operation, given)
        return rest

    def _names_operation(self, args: Sequence[str]) -> bool:
        if not args or args[0].startswith("-"):
            return False
        from catalog.errors import UsageError

        try:
            _problem_type(args[0])
        except UsageError:
            if any(parameter.param_type_name == "argument" for parameter in self.params):
                return False
            raise
        return True

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the problem, then those of the command."""
        stated = ctx.meta.get(_STATED)
        operation = None if stated is None else stated.operation
        return [*problem_options(_problem_type(operation)), *super().get_params(ctx)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line, with the optional operation."""
        return ["[OPERATION]", *super().collect_usage_pieces(ctx)]


@lru_cache
def problem_options(problem_type: type[BaseModel]) -> Sequence[Any]:
    """An option for each field of ``problem_type``, with the field's type, allowed words, default and help.

    The value of an option that is not given is None.
    """
    from catalog.schema.fields import fields_of

    def options() -> None: ...

    options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(name, field) for name, field in fields_of(problem_type).items()]
    )
    made = typer.Typer(add_completion=False)
    made.command()(options)
    return tuple(typer.main.get_command(made).params)


_TYPES = {"integer": int, "number": float, "boolean": bool, "string": str, "array": str}


def _parameter(name: str, field: Described) -> inspect.Parameter:
    about = field.about[:1].upper() + field.about[1:]
    words = f": {', '.join(field.words)}" if field.words else ""
    default = f"; default: {field.default}" if field.default else ""
    option = typer.Option(
        None,
        f"--{name.replace('_', '-')}",
        help=f"{about}{words}{default}.",
        show_default=False,
        parser=_integers if field.type == "array" else None,
        metavar="INTEGERS" if field.type == "array" else None,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_TYPES[field.type] | None)


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected integers separated by commas") from None


def _problem_type(name: str | None) -> type[Problem]:
    """The problem class of the operation ``name``; None is the default operation.

    Raises:
        UsageError: there is no such operation.
    """
    from catalog.ops import DEFAULT, operation

    return operation(name or DEFAULT).problem
