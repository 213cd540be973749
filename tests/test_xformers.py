"""xformers' memory_efficient_attention by the catalog's kernels, against the same in float64 with the mask's elements.

The biases have the class names and the attributes of xformers' own. Head dims are below 32, as in test_torch.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import missing

from catalog.errors import ArgumentError, SelectionError, TensorError

try:
    import torch
except ImportError:
    missing("torch")

from torch_cases import bottom_right, close, flash64, normal

from catalog.integrations.xformers import memory_efficient_attention

HEADS, HDIM = 4, 8
QUERIES, KEYS = [3, 4, 5], [7, 2, 9]
ROOM = 12
"""Keys that a padded block has room for."""


def bias(name, **attributes):
    return type(name, (SimpleNamespace,), {})(**attributes)


def starts(lengths):
    return [sum(lengths[:number]) for number in range(len(lengths) + 1)]


def top_left(queries, keys, left=-1, right=-1):
    """Which keys a window shows whose diagonal starts at the first key."""
    apart = torch.arange(keys) - torch.arange(queries)[:, None]
    return ((left < 0) | (apart >= -left)) & ((right < 0) | (apart <= right))


WINDOWS = {
    "": (bottom_right, {}, -1, -1),
    "Causal": (top_left, {}, -1, 0),
    "CausalFromBottomRight": (bottom_right, {}, -1, 0),
    "CausalLocalAttention": (top_left, {"_window_size": 3}, 2, 0),
    "CausalLocalAttentionFromBottomRight": (bottom_right, {"_window_size": 3}, 2, 0),
}
OF_KEYS = {
    "BlockDiagonalPaddedKeysMask": ({}, -1, -1),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ({}, -1, 0),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ({"window_left": 2, "window_right": 1}, 2, 1),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ({"_window_size": 4}, 3, 0),
    "PagedBlockDiagonalPaddedKeysMask": ({}, -1, -1),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": ({}, -1, 0),
    "BlockDiagonalGappyKeysMask": ({}, -1, -1),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ({}, -1, 0),
}


def inputs(queries, keys, heads_k=HEADS, batch=1):
    return (
        normal(batch, n, heads, HDIM, seed=s)
        for n, heads, s in ((queries, HEADS, 0), (keys, heads_k, 1), (keys, heads_k, 2))
    )


def check(attn_bias, seen, q, k, v, **options):
    close(memory_efficient_attention(q, k, v, attn_bias, **options), flash64(q, k, v, seen)[0])


@pytest.mark.parametrize(
    ("name", "attributes", "seen"),
    [
        ("LowerTriangularMask", {}, top_left(5, 9, right=0)),
        ("LowerTriangularFromBottomRightMask", {}, bottom_right(5, 9, right=0)),
        pytest.param(
            "LowerTriangularFromBottomRightLocalAttentionMask",
            {"_window_size": 3},
            bottom_right(5, 9, 2, 0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "LocalAttentionFromBottomRightMask",
            {"window_left": 1, "window_right": 2},
            bottom_right(5, 9, 1, 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_masks_of_a_batch(name, attributes, seen):
    check(bias(name, **attributes), seen, *inputs(5, 9, batch=2))


@pytest.mark.slow
@pytest.mark.parametrize("which", WINDOWS)
def test_blocks_are_packed_sequences(which):
    corner, attributes, left, right = WINDOWS[which]
    q, k, v = inputs(sum(QUERIES), sum(KEYS))
    k_info, q_info = (SimpleNamespace(seqstart_py=starts(lengths)) for lengths in (KEYS, QUERIES))
    seen = torch.block_diag(*(corner(m, n, left, right) for m, n in zip(QUERIES, KEYS, strict=True))).bool()
    check(bias(f"BlockDiagonal{which}Mask", q_seqinfo=q_info, k_seqinfo=k_info, **attributes), seen, q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_KEYS)
def test_padded_paged_and_gappy_keys(name):
    attributes, left, right = OF_KEYS[name]
    total = ROOM * len(KEYS)
    q, k, v = inputs(sum(QUERIES), total, heads_k=2)
    first = [number * ROOM for number in range(len(KEYS) + 1)]
    info = {"seqlen_py": KEYS, "seqstart_py": first, "padding": ROOM}
    places = torch.arange(total).view(len(KEYS), ROOM)
    if "Gappy" in name:
        del info["padding"]
        info["seqstart_py"] = [1, 13, 25, total]
        places = places + 1
    if "Paged" in name:
        table = torch.randperm(total // 4, generator=torch.Generator().manual_seed(1)).view(len(KEYS), -1)
        attributes = {"block_tables": table.int(), "page_size": 4}
        places = (table[:, :, None] * 4 + torch.arange(4)).flatten(1)
    seen = torch.zeros(sum(QUERIES), total, dtype=torch.bool)
    for row, (m, n) in enumerate(zip(QUERIES, KEYS, strict=True)):
        seen[starts(QUERIES)[row] :][:m, places[row, :n]] = bottom_right(m, n, left, right)
    q_info = SimpleNamespace(seqstart_py=starts(QUERIES))
    check(bias(name, q_seqinfo=q_info, k_seqinfo=SimpleNamespace(**info), **attributes), seen, q, k, v)


@pytest.mark.slow
def test_tensors_axes_and_gradients():
    q, k, v = inputs(5, 9, batch=2)
    elements = normal(2, HEADS, 5, 9, seed=3)
    expected = flash64(q, k, v, torch.ones(5, 9, dtype=torch.bool), lambda scores: scores + elements.double())[0]
    close(memory_efficient_attention(q, k, v, elements), expected)
    of_ones_own = bias("LowerTriangularMaskWithTensorBias", materialize=lambda shape, dtype, device: elements.to(dtype))
    close(memory_efficient_attention(q, k, v, of_ones_own), expected)
    one = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], elements[:, 0])
    close(one, expected[:, :, 0])
    groups = k[:, :, :2, None].expand(2, 9, 2, 2, HDIM), v[:, :, :2, None].expand(2, 9, 2, 2, HDIM)
    grouped = memory_efficient_attention(q.view(2, 5, 2, 2, HDIM), *groups)
    close(grouped.flatten(2, 3), flash64(q, k[:, :, :2], v[:, :, :2], torch.ones(5, 9, dtype=torch.bool))[0])
    leaf = k.clone().requires_grad_()
    o = memory_efficient_attention(q, leaf, v, bias("LowerTriangularMask"), scale=0.3)
    assert torch.autograd.grad(o.sum(), leaf)[0].abs().sum() > 0


def test_what_no_kernel_follows_is_refused_with_the_reason():
    q, k, v = inputs(5, 9)
    info = SimpleNamespace(seqstart_py=[0, 5])
    blocks = {"q_seqinfo": info, "k_seqinfo": SimpleNamespace(seqstart_py=[0, 9], seqlen_py=[3], padding=9)}
    refused = [
        ({"attn_bias": bias("PagedBlockDiagonalGappyKeysMask", **blocks)}, "type PagedBlockDiagonalGappyKeysMask"),
        ({"attn_bias": bias("BlockDiagonalPaddedKeysMask", **blocks), "p": 0.5}, "have no dropout"),
        ({"attn_bias": "causal"}, "type str"),
        ({"output_dtype": torch.float64}, "output_dtype"),
    ]
    for options, words in refused:
        with pytest.raises(NotImplementedError, match=words) as caught:
            memory_efficient_attention(q, k, v, **options)
        assert isinstance(caught.value, SelectionError)
    short = bias("BlockDiagonalMask", q_seqinfo=info, k_seqinfo=SimpleNamespace(seqstart_py=[0, 4]))
    with pytest.raises(ValueError, match="of 5 packed queries and 4 packed keys") as caught:
        memory_efficient_attention(q, k, v, short)
    assert isinstance(caught.value, ArgumentError)
    with pytest.raises(TensorError, match="three to five axes"):
        memory_efficient_attention(q[0, 0], k, v)
