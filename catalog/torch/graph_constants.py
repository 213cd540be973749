"""Results that are constants of traced graphs. Importing this imports Dynamo, which takes more than a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, called while a graph is traced, as a constant of the graph."""
    return function(*arguments)
