"""Types of rows written by another machine or process.

Records of the cache, bundles and merged catalogs are all validated against them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from catalog.errors import ProblemError
from catalog.files import parse_json
from catalog.schema.name_parts import sql_literal
from catalog.schema.policy import MeasuredAs
from catalog.schema.problem_form import canonical

CLOCK_SKEW = timedelta(days=1)
"""How far the clock of another machine may be ahead."""

MOST_CHARACTERS = 2**16
"""Maximum length of a text: a record has up to 20,000 characters of a compiler's output."""

_ROUNDING = 1e-9
"""Relative tolerance: percentiles of equal durations may differ in the last digit."""


_ASCENDING = (
    *pairwise(("min_ms", "p10_ms", "median_ms", "p90_ms")),
    *pairwise(("min_ms", "low_ms", "median_ms", "high_ms")),
)
"""Pairs of columns of a timing, of which the first is at most the second."""


def is_future(stamp: str) -> bool:
    """Whether a :data:`Stamp` is further ahead than :data:`CLOCK_SKEW`, or is not a date."""
    try:
        return datetime.fromisoformat(stamp) > datetime.now(timezone.utc) + CLOCK_SKEW
    except ValueError:
        return True


def _not_in_future(stamp: str) -> str:
    if is_future(stamp):
        raise ValueError("a date in the future, or none")
    return stamp


def _is_facts(text: str) -> str:
    if not isinstance(parse_json(text), dict):
        raise ValueError("expected a JSON object")
    return text


@functools.lru_cache(maxsize=4096)
def is_problem(key: str) -> bool:
    """Whether ``key`` is the key of a problem that this version knows."""
    from catalog.ops import problem_of

    try:
        return problem_of(parse_json(key)).key == key
    except (ProblemError, ValueError, TypeError, OverflowError, RecursionError):
        return False


def _is_problem(key: str) -> str:
    if not is_problem(key):
        raise ValueError("not the key of a problem")
    return key


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256, in hex."""

Name = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A line of text."""

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Count = Annotated[int, Field(ge=0, lt=2**31)]

Score = Annotated[float, Field(ge=1 - 1e-9, le=1e9, allow_inf_nan=False)]
"""A time over that of the best."""

Milliseconds = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
"""A measured time: from a nanosecond to eleven days."""

Stamp = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00$")]
"""ISO 8601 in UTC, to the second: equal instants have equal texts, and texts sort by time."""

PastStamp = Annotated[Stamp, AfterValidator(_not_in_future)]
"""A stamp that is at most :data:`CLOCK_SKEW` ahead of this machine's clock."""

ProblemKey = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_is_problem)]


@functools.lru_cache(maxsize=4096)
def _is_canonical(text: str) -> str:
    fields = json.loads(_is_facts(text))
    if any(type(value) not in (str, int) for value in fields.values()) or text != canonical(fields):
        raise ValueError("expected a JSON object of texts and integers, in canonical form")
    return text


def _is_text(text: str) -> str:
    if not all(isinstance(value, str) for value in json.loads(_is_facts(text)).values()):
        raise ValueError("expected a JSON object of texts")
    return text


Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,59}$")]
"""The name of an arch, an operation, a format."""

Facts = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_is_facts)]
"""A JSON object."""

CanonicalFacts = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_is_canonical)]
"""A JSON object of texts and integers; equal objects have equal texts."""

TextFacts = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_is_text)]
"""A JSON object of texts, in an order that counts."""


class Row(BaseModel):
    """Frozen and strict: text is not taken for a number, and unknown columns are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Device(Row):
    """The device of a timing; ``facts`` is a JSON object."""

    arch: Name
    name: Name
    facts: Facts


class Timing(Row):
    """A row of table ``timing``, with its problem and its device in full."""

    artifact_key: Digest
    problem: ProblemKey
    device: Device
    measured_as: MeasuredAs = "graph"  # bundles of older versions do not state it
    cold: Annotated[int, Field(ge=0, le=1)]
    n: Annotated[int, Field(ge=1, lt=2**31)]
    min_ms: Milliseconds
    median_ms: Milliseconds
    p10_ms: Milliseconds
    p90_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds
    tflops: Amount
    gbps: Amount
    load: Amount | None
    clock_mhz: Amount | None
    created: PastStamp

    @model_validator(mode="after")
    def _in_order(self) -> Timing:
        if any(getattr(self, before) > getattr(self, after) * (1 + _ROUNDING) for before, after in _ASCENDING):
            raise ValueError("the percentiles are not in order")
        return self


class Model(Row):
    """A row of table ``model``, without its lineage and its device."""

    kind: Facts
    measured_as: MeasuredAs
    cold: Annotated[int, Field(ge=0, le=1)]
    terms: Text
    factors: Facts
    candidates: Annotated[int, Field(ge=1, lt=2**31)]
    problems: Count
    timings: Count
    static: Score
    nearest: Score
    predicted: Score
    created: PastStamp

    @model_validator(mode="after")
    def _fits(self) -> Model:
        terms, factors = parse_json(self.terms), parse_json(self.factors)
        if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
            raise ValueError("the terms are not a list of names")
        for found in factors.values():
            if not isinstance(found, list) or len(found) != len(terms):
                raise ValueError("a kernel has not one factor for each term")
            if not all(type(factor) in (int, float) and 0 <= factor < math.inf for factor in found):
                raise ValueError("a factor is not a number from 0")
        return self


class ForeignTiming(Row):
    """A time of another project's kernel; the fields are columns of the ``foreign_`` tables.

    Tables state no policy; it is that of times measured here.
    """

    source: Word
    operation: Word
    name: Annotated[str, Field(min_length=1, max_length=4_000, pattern=r"^[^\x00-\x1f\x7f]*$")]
    traits: CanonicalFacts
    device: Device
    format: Word
    table_name: Word
    problem: CanonicalFacts
    median_ms: Milliseconds | None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None
    tool: Name
    measured: PastStamp | None
    fields: TextFacts
    file: Name
    line: Count
    measured_as: MeasuredAs | None = None
    cold: Annotated[int, Field(ge=0, le=1)] | None = None

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 of everything but ``file`` and ``line``: a copy of a table states the same timings."""
        device = (self.device.arch, self.device.name, self.device.facts)
        kernel = (self.source, self.operation, self.name, self.traits)
        about = (self.format, self.table_name, self.problem, self.fields)
        measured = (self.median_ms, self.n, self.tool, self.measured)
        policy = () if self.measured_as is None else (self.measured_as, self.cold)
        return hashlib.sha256(json.dumps((*device, *kernel, *about, *measured, *policy)).encode()).hexdigest()


@functools.cache
def timing_limits() -> str:
    """The limits of the numbers, words and dates of :class:`Timing` as a condition on table ``timing``, in SQL.

    The latest date is the parameter ``latest``. A row that does not meet the condition may still be valid.
    """
    limits = [_within(f"timing.{name}", schema) for name, schema in Timing.model_json_schema()["properties"].items()]
    ascending = [f"timing.{before} <= timing.{after} * {1 + _ROUNDING!r}" for before, after in _ASCENDING]
    # SQLite turns a date that does not exist, such as 31 February, into one that does. Python has no year 0.
    date = "strftime('%Y-%m-%dT%H:%M:%S+00:00', created) IS created AND created BETWEEN '0001' AND :latest"
    # Many timings have the same date. LIMIT makes SQLite find the different ones before it checks any.
    dates = f"timing.created IN (SELECT created FROM (SELECT DISTINCT created FROM timing LIMIT -1) WHERE {date})"
    return " AND ".join([*filter(None, limits), *ascending, dates])


def latest_stamp() -> str:
    """The latest :data:`PastStamp`."""
    return (datetime.now(timezone.utc) + CLOCK_SKEW).isoformat(timespec="seconds")


def _within(column: str, schema: Mapping[str, Any]) -> str:
    """The limits that a JSON schema sets for a column, in SQL; empty for texts and objects."""
    if "anyOf" in schema:
        return f"({' OR '.join(_within(column, one) for one in schema['anyOf'])})"
    if "enum" in schema:
        return f"{column} IN ({', '.join(map(sql_literal, schema['enum']))})"
    if schema.get("type") == "null":
        return f"{column} IS NULL"
    if schema.get("type") not in ("integer", "number"):
        return ""
    limits = {"minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
    # What has no largest value may not be infinite either.
    finite = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": sys.float_info.max}
    stated = {**schema, **finite}
    return " AND ".join(f"{column} {sign} {stated[name]!r}" for name, sign in limits.items() if name in stated)
