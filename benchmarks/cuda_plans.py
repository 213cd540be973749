"""What the comparisons of kernels for NVIDIA GPUs with PyTorch's share: options, plans, figures, the file of rows."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_vs_torch import Row, medians

from catalog import Catalog
from catalog.runtime.plan import Plan
from catalog.schema.problem import Problem


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """The options of all; ``about`` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--candidates", type=int, default=4, help="kernels of each problem; 1: only what is selected")
    parser.add_argument("--seconds", type=float, default=0.4, help="total for all sides of one problem")
    parser.add_argument("--db", type=Path, default=None, help="the catalog")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


class Bench:
    """The catalog, and how long and how much to time."""

    def __init__(self, catalog: Catalog, options: argparse.Namespace) -> None:
        self.catalog = catalog
        self.candidates: int = options.candidates
        self.seconds: float = options.seconds

    def plans(self, problem: Problem) -> list[Plan]:
        """The first plans of the static order."""
        found = self.catalog.candidates(problem, arch="sm_90", limit=self.candidates, static=True)
        return [self.catalog.plan(problem, candidate.kernel) for candidate in found]

    def build(self, problems: Sequence[Problem]) -> None:
        """Compile all plans, on every core."""
        kernels = {kernel.id: kernel for one in problems for plan in self.plans(one) for kernel in plan.kernels}
        for failure in self.catalog.builder.build_many(kernels.values()).failures:
            print(f"{failure.kernel.name}: {failure.error}")

    def compared(
        self, problem: Problem, ours: Sequence[Callable[[], Any]], library: str, theirs: Callable[[], Any]
    ) -> tuple[dict[str, float], int]:
        """TFLOP/s of the first call of ours, of the best one and of a library, and which is the best."""
        places = {str(place): call for place, call in enumerate(ours)}
        times = medians({**places, library: theirs}, self.seconds, cold=True)
        other = times.pop(library)
        best = min(times, key=lambda place: times[place])
        rates = {"ours": times["0"], "best": times[best], library: other}
        figures = {name: problem.flops / ms / 1e9 for name, ms in rates.items()}
        figures |= {f"of {library}": other / times["0"], f"best of {library}": other / times[best]}
        return figures | {"us": 1e3 * times["0"]}, int(best)


def print_means(title: str, library: str, of: Sequence[Mapping[str, float]]) -> None:
    """Print the shares of a library's speed that :meth:`Bench.compared` returned."""
    for figure in (f"of {library}", f"best of {library}") if of else ():
        shares = [figures[figure] for figures in of]
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        print(f"{title}: {figure} {mean:.3f} on geometric mean of {len(of)}, worst {min(shares):.3f}")


def write_rows(rows: Sequence[Row], path: Path | None) -> None:
    """Write the rows as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
