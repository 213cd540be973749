"""The argument struct of convolutions, which all their kernels take on every target."""

from __future__ import annotations

from catalog.schema.arguments import Arguments, Size

ARGUMENTS = Arguments(
    about="The arguments of a grouped convolution: output = input * weight, or one of its gradients.",
    strides={"first": "between images, or between the filters of output channels"},
    tensors={
        "input": "(n, c, in); its gradient in backward data",
        "weight": "(k, c / g, filter); its gradient in backward weight",
        "output": "(n, k, out); its gradient in the backward directions",
    },
    lists={"geometry": "for depth, height and width: extents of input, output and filter, strides, dilations, padding"},
    host_lists=True,
    sizes=(
        Size("n", "images"),
        Size("c", "channels of the input"),
        Size("k", "channels of the output"),
        Size("g", "groups of channels"),
    ),
)
