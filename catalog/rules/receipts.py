"""Look up receipts by number or name."""

from __future__ import annotations

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.schema.arch_spec import ArchSpec


def resolve_receipts(spec: ArchSpec, text: str) -> tuple[int, ...]:
    """The receipts that ``text`` denotes: a number, or a name that one or several receipts share.

    Raises:
        UsageError: ``spec`` has no such receipt.
    """
    numbers = spec.receipt_numbers
    found = (int(text),) if text.isdecimal() else tuple(r.receipt for r in spec.receipts if text in r.names)
    if found and set(found) <= set(numbers):
        return found
    names = sorted({name for receipt in spec.receipts for name in receipt.names})
    there = f"There are: {', '.join(map(str, numbers))}, or by name: {', '.join(names)}." if numbers else (
        "It has none: receipts are upstream's product subsets, and its kernels are our own."
    )  # fmt: skip
    raise UsageError(f"{spec.arch} has no receipt {text!r}{did_you_mean(text, names)}", hint=there)
