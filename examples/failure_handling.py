"""Errors: one exception tree under CatalogError, and each message says what to do next."""

from collections.abc import Callable

import numpy as np

from catalog import Catalog, CatalogError, Problem
from catalog.errors import DeviceError, ProblemError, QueryError, SelectionError, TensorError, UsageError

SHAPE = {"batch": 1, "nhead_q": 4, "seqlen_q": 32, "hdim_q": 64}
problem = Problem(dtype="fp32", **SHAPE)
q, k, v = (np.zeros((1, 4, 32, 64), np.float32) for _ in range(3))


def expect(kind: type[CatalogError], what: str, action: Callable[[], object], word: str) -> None:
    """Run an action that must fail, print its message, and check that it contains ``word``."""
    print(f"\n{what}")
    try:
        action()
    except kind as error:
        text = str(error)  # the message, and a hint where there is one
        print(f"{type(error).__name__}: {text}".replace("\n", "\n    "))
    else:
        raise AssertionError(f"{what}: nothing was raised")
    if word not in text:
        raise AssertionError(f"{what}: the message lacks {word!r}")


expect(ProblemError, "a dtype that does not exist", lambda: Problem(dtype="fp23", **SHAPE), "fp32")
expect(ProblemError, "heads that do not divide", lambda: Problem(nhead_k=3, **SHAPE), "must divide")
expect(ProblemError, "a field of another op", lambda: Problem(num_splits=4, **SHAPE), "splitkv")
expect(
    TensorError,
    "a tensor of another shape",
    lambda: Catalog.select(problem).run(q=q, k=k[:, :, :16], v=v),
    "(1, 4, 32, 64)",
)
expect(
    TensorError, "a tensor of another dtype", lambda: Catalog.select(problem).run(q=q, k=k, v=v.astype(float)), "v is"
)
expect(
    SelectionError,
    "features that no kernel has together: a soft cap and a bias",
    lambda: Catalog.select(Problem(dtype="fp32", logits_soft_cap=30.0, bias="bias", **SHAPE)),
    "logits",
)
print("explain() names the rule:")
rules = Catalog().explain({"family": "fwd", "dtype": "fp32", "logits": True, "bias": "bias"}).rejections
for rule in rules:
    print(f"    {rule.kind} {rule.id}: {rule.reason}")
assert "soft_cap_excludes_bias" in {rule.id for rule in rules}
expect(
    SelectionError,
    "a head dim that a rule forbids",
    lambda: Catalog.select(Problem(dtype="fp32", **{**SHAPE, "hdim_q": 520})),
    "hdim_q_fits",
)
expect(
    DeviceError,
    "a GPU's kernel on a machine without one",
    lambda: Catalog.select(Problem(dtype="bf16", **SHAPE), arch="gfx950").run(),
    "gfx950",
)
expect(UsageError, "an arch that does not exist", lambda: Catalog().populate("gfx9999"), "gfx9999")
expect(QueryError, "a column that does not exist", lambda: Catalog().kernels("pipelin = 'qr'"), "pipeline")
