"""The argument struct of GEMM, which all its kernels take on every target."""

from __future__ import annotations

from catalog.schema.arguments import NUM_SPLITS, Arguments, Scalar, Size

ARGUMENTS = Arguments(
    about="The arguments of GEMM: C = f(alpha A B + beta C + bias), combined with D tensors; A and B may have scales.",
    strides={
        "batch": "between products of a batch",
        "outer": "between rows, or between columns if the tensor is column-major",
    },
    tensors={
        "#matrices": "Groups along an axis have no axis of the batch there.",
        "a": "(batch, m, k)",
        "b": "(batch, k, n)",
        "scale_a": "(batch, m), or (batch, m, ceil(k / 128)); float32",
        "scale_b": "(batch, n), or (batch, ceil(n / 128), ceil(k / 128)); float32",
        "bias": "(n); NULL: none",
        "d0": "(batch, m, n)",
        "d1": "(batch, m, n)",
        "c": "(batch, m, n); not read if beta is 0",
        "c_acc": "partial sums of C, or what else a kernel keeps in its workspace",
    },
    lists={"starts": "batch + 1 starts of groups along an axis, the last one is its extent; NULL: no groups"},
    sizes=(Size("batch", source="products"), Size("m"), Size("n"), Size("k"), Size(NUM_SPLITS, "parts of the depth")),
    scalars=(
        Scalar("alpha", "float32"),
        Scalar("beta", "float32"),
        Scalar("activation", "int32", "catalog_activation: f", source="activation_number"),
        Scalar("group_axis", "int32", "catalog_group_axis", source="group_axis_number"),
    ),
    workspaces=("c_acc",),
    constants={
        "catalog_activation": {
            "CATALOG_PASS_THROUGH": "f(x) = x",
            "CATALOG_RELU": "max(x, 0)",
            "CATALOG_GELU": "x Phi(x), with the normal distribution Phi",
            "CATALOG_SILU": "x / (1 + exp(-x))",
        },
        "catalog_group_axis": {
            "CATALOG_GROUPS_OF_M": "rows of A and C; each group has its own B",
            "CATALOG_GROUPS_OF_K": "columns of A and rows of B; each group has its own C",
        },
    },
)
