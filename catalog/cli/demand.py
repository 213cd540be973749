"""Commands that take problems from a trace, a set of problems, or a model; one set of options for all of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from catalog.runtime.demand import Demand

_STATED = f"{__name__}.stated"


@dataclass(frozen=True)
class StatedDemand:
    """The options of a :class:`DemandCommand` that say which problems; at most one source is given."""

    trace: Path | None
    shapes: str | None
    model: Path | None
    tp: int
    max_len: int | None
    max_batch: int
    phase: str
    page_size: int
    revision: str | None

    def __bool__(self) -> bool:
        return any(source is not None for source in (self.trace, self.shapes, self.model))

    def read(self, arch: str | None) -> Demand:
        """The problems, on ``arch``. None: this machine's CPU, or the lineages that a trace was recorded on.

        Raises:
            UsageError: there is not exactly one source, or it is wrong.
            SpecError: a set of problems that comes with the catalog is wrong.
            DeviceError: no host arch runs on this machine's CPU.
        """
        from catalog.errors import UsageError
        from catalog.runtime.demand import Demand
        from catalog.schema.deployment import Deployment

        if sum(source is not None for source in (self.trace, self.shapes, self.model)) != 1:
            raise UsageError(
                "give exactly one of: --trace FILE, --shapes SET, --model config.json",
                hint="For example: --model config.json --tp 8",
            )
        if self.trace is not None:
            return Demand.of_trace(self.trace, arch, self.revision)
        if self.shapes is not None:
            return Demand.of_shapes(self.shapes, arch or "host", self.revision)
        phases = tuple(dict.fromkeys(self.phase.split(",")))
        deployment = Deployment(self.tp, self.max_len, self.max_batch, phases, self.page_size)
        return Demand.of_model(cast(Path, self.model), deployment, arch or "host", self.revision)


def stated_demand(context: typer.Context) -> StatedDemand:
    """The options about problems in the call of a :class:`DemandCommand`."""
    return cast(StatedDemand, context.meta[_STATED])


class DemandCommand(TyperCommand):
    """A command with the options of :class:`StatedDemand`, before its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; :func:`stated_demand` returns those about problems."""
        rest = super().parse_args(ctx, args)
        ctx.meta[_STATED] = StatedDemand(**{name: ctx.params.pop(name) for name in StatedDemand.__annotations__})
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """The options about problems, then those of the command."""
        return [*_options(), *super().get_params(ctx)]


@lru_cache
def _options() -> tuple[Any, ...]:
    def options(
        trace: Annotated[Path | None, typer.Option(metavar="FILE", help="The problems of a recorded trace.")] = None,
        shapes: Annotated[
            str | None,
            typer.Option(metavar="SET", help="The problems of a set of `catalog shapes`, or of a YAML file."),
        ] = None,
        model: Annotated[
            Path | None, typer.Option(metavar="FILE", help="The problems of a model: its config.json of Hugging Face.")
        ] = None,
        tp: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks that share each layer of the model.")] = 1,
        max_len: Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="Longest sequence of the model, in tokens. Default: its own limit."),
        ] = None,
        max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Largest batch that the model decodes.")] = 256,
        phase: Annotated[
            str, typer.Option(metavar="LIST", help="Phases of the model: prefill, decode, train.")
        ] = "prefill,decode",
        page_size: Annotated[
            int, typer.Option(min=1, metavar="N", help="Tokens of a page of the model's paged cache.")
        ] = 16,
        revision: Annotated[
            str | None, typer.Option(help="Upstream revision that answers the problems. Default: the arch's own.")
        ] = None,
    ) -> None: ...

    options.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    made = typer.Typer(add_completion=False)
    made.command()(options)
    return tuple(typer.main.get_command(made).params)
