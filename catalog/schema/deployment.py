"""How a model is deployed: what its calls depend on besides its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.errors import UsageError
from catalog.files import parse_json, read_given
from catalog.messages import did_you_mean

PHASES = ("prefill", "decode", "train")
"""What a model does: read a prompt, generate one token after another, learn."""


@dataclass(frozen=True)
class Deployment:
    """How a model is deployed.

    Attributes:
        tp: number of ranks that share each layer (tensor parallelism).
        max_len: longest sequence in tokens; None: the longest that the model was made for.
        max_batch: largest number of sequences in a batch.
        phases: which of :data:`PHASES` happen.
        page_size: tokens of a page of a paged cache.

    Raises:
        UsageError: a number is not positive, or a phase is unknown.
    """

    tp: int = 1
    max_len: int | None = None
    max_batch: int = 256
    phases: Sequence[str] = ("prefill", "decode")
    page_size: int = 16

    def __post_init__(self) -> None:
        for name in ("tp", "max_len", "max_batch", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} must be positive")
        for phase in self.phases:
            if phase not in PHASES:
                raise UsageError(
                    f"phase {phase!r} is unknown{did_you_mean(phase, PHASES)}", hint=f"Allowed: {', '.join(PHASES)}."
                )


def read_model(path: Path) -> Mapping[str, Any]:
    """The configuration of a model: the ``config.json`` beside its weights, as Hugging Face's libraries write it.

    Raises:
        UsageError: the file cannot be read, or is not a JSON object.
    """
    try:
        config = parse_json(read_given(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: a {type(config).__name__}, expected the object of a model's config.json")
    return config


def sizes_up_to(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Sizes that stand for all from ``smallest`` to ``largest``: powers of two, one less than each, and both ends.

    Rules of kernels ask whether a tile divides a size, and where a size lies between powers of two: a power of two and
    the odd number before it have all the answers.
    """
    powers = [1 << step for step in range(largest.bit_length())]
    sizes = {smallest, largest, *(size for power in powers for size in (power, power - 1))}
    return tuple(sorted(size for size in sizes if smallest <= size <= largest))
