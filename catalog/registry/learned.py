"""Models of the time in the registry: one for each kind of problems, lineage, device and measuring policy."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple

from catalog.schema.policy import CONDITION, Policy

Arm = Literal["static", "nearest", "predicted"]

ARMS: tuple[Arm, ...] = ("static", "nearest", "predicted")
"""The evidence that may decide about a problem that was not measured."""

COLUMNS = ("terms", "factors", "candidates", "problems", "timings", *ARMS, "created")
"""The columns of table ``model`` that mean the same in every catalog, without its key."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model of the time of kernels: the names of its terms, and the factor of each in ms, by kernel id."""

    terms: tuple[str, ...]
    factors: Mapping[str, Sequence[float]]

    def ms(self, kernel_id: str, work: Mapping[str, float]) -> float:
        """The predicted time of a kernel that does this ``work``, the amount of each term by name.

        Raises:
            KeyError: the kernel has no factors.
        """
        factors = self.factors[kernel_id]
        return sum([work.get(name, 0.0) * factor for name, factor in zip(self.terms, factors, strict=True)])


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned about problems of a kind.

    Attributes:
        model: predicts the times of its kernels.
        candidates: number of kernels of the static order from which the prediction chooses.
        problems: number of measured problems.
        timings: number of timings.
        scores: for each way to choose, the time of its choices over that of the best kernel: the geometric mean over
            measured problems, each of which was left out of the evidence.
        units: CPU threads or multiprocessors of the device.
        created: when, ISO 8601 in UTC.
    """

    model: CostModel = field(repr=False)
    candidates: int
    problems: int
    timings: int
    scores: Mapping[Arm, float]
    units: int
    created: str = ""

    @property
    def best(self) -> Arm:
        """The way to choose with the best score; of equal ones the nearest problem, as without learning."""
        return min(ARMS, key=lambda arm: (self.scores[arm], arm != "nearest"))

    def about(self, arm: Arm) -> str:
        """Why ``arm`` decides, as a clause."""
        evidence = {
            "static": "the best evidence on problems of this kind",
            "nearest": "the nearest problem is the best evidence on problems of this kind",
            "predicted": f"from {self.timings:,} timings of {self.problems:,} problems of this kind",
        }
        others = {"static": "static order", "nearest": "nearest problem", "predicted": "predictions"}
        compared = ", ".join(f"{others[other]}: {_percent(self.scores[other])}" for other in ARMS if other != arm)
        return (
            f"{evidence[arm]}; on problems that were left out, its choices take {_percent(self.scores[arm])} longer "
            f"than the best kernel ({compared})"
        )

    @property
    def columns(self) -> dict[str, Any]:
        """The values of :data:`COLUMNS`."""
        return {
            "terms": json.dumps(self.model.terms),
            "factors": json.dumps(self.model.factors, sort_keys=True, separators=(",", ":")),
            "candidates": self.candidates,
            "problems": self.problems,
            "timings": self.timings,
            **{str(arm): score for arm, score in self.scores.items()},
            "created": self.created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


class Place(NamedTuple):
    """What a model is about: problems of a kind, kernels of a lineage, a device (both row ids), and a policy."""

    kind: str
    lineage: int | None
    device: int
    policy: Policy

    @property
    def parameters(self) -> dict[str, Any]:
        """The columns of the key of table ``model``."""
        key = {"kind": self.kind, "lineage": self.lineage, "device_id": self.device}
        return {**key, **self.policy.parameters}


def learned(connection: sqlite3.Connection, place: Place) -> Learned | None:
    """What was learned about a place, if anything was."""
    row = connection.execute(
        "SELECT model.*, coalesce(json_extract(facts, '$.cores'), 1) AS units FROM model "
        "JOIN device ON device.id = device_id "
        f"WHERE kind = :kind AND lineage = :lineage AND device_id = :device_id AND {CONDITION}",
        place.parameters,
    ).fetchone()
    if row is None:
        return None
    factors = {kernel_id: tuple(found) for kernel_id, found in json.loads(row["factors"]).items()}
    return Learned(
        CostModel(tuple(json.loads(row["terms"])), factors),
        candidates=row["candidates"],
        problems=row["problems"],
        timings=row["timings"],
        scores={arm: row[arm] for arm in ARMS},
        units=row["units"],
        created=row["created"],
    )


def _percent(score: float) -> str:
    return f"{100 * (score - 1):.1f} %"


def keep(connection: sqlite3.Connection, place: Place, columns: Mapping[str, Any]) -> None:
    """Store the :attr:`Learned.columns` of a place, in the caller's transaction; they replace older ones."""
    row = {**place.parameters, **columns}
    holes = ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT OR REPLACE INTO model ({', '.join(row)}) VALUES ({holes})", row)
