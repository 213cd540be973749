"""Check the SQL expressions of a spec when it is loaded, against the columns that they may use."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache

from catalog.schema.fields import IDENTITY, TRAITS

SELECT_PARAMETERS = ("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v", "compute_units")
"""What a selection rule may ask of the problem (group mode: the longest sequences) and of the device."""

SELECT_COLUMNS = ("hw_valid", "dispatch_order")


@cache
def _scratch() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    columns = (*IDENTITY, *TRAITS, *SELECT_COLUMNS)
    connection.execute(f"CREATE TABLE kernel ({', '.join(columns)})")
    return connection


def what_is_wrong(expression: str, parameters: Iterable[str] = ()) -> str | None:
    """Why ``expression`` is no SQL over the kernel columns and ``:parameters``; None when it is."""
    allowed = list(parameters)
    unknown = [name for name in re.findall(r":(\w+)", expression) if name not in allowed]
    if unknown:
        return f"no parameter :{unknown[0]}; allowed: {', '.join(f':{name}' for name in allowed) or 'none'}"
    try:
        _scratch().execute(f"EXPLAIN SELECT ({expression}) FROM kernel", dict.fromkeys(allowed))
    except sqlite3.Error as error:
        message = str(error)
        missing = re.fullmatch(r"no such column: (\w+)", message)
        near = get_close_matches(missing.group(1), (*IDENTITY, *TRAITS), n=3) if missing else []
        return f"{message} in {expression!r}" + (f"; near: {', '.join(near)}" if near else "")
    return None
