"""Products, convolutions, latent attention and compiled calls of PyTorch's tensors on sm_90, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cuda_gpu import need_gpu

from catalog.errors import SelectionError

need_gpu()
torch: Any = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from catalog.integrations.flashinfer import BatchMLAPagedAttentionWrapper  # noqa: E402
from catalog.torch import (  # noqa: E402
    compile_calls,
    conv1d,
    conv2d,
    conv3d,
    grouped_mm,
    linear,
    matmul,
    native,
    scaled_dot_product_attention,
    scaled_mm,
)

ACTIVATIONS: Mapping[Any, Any] = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
TYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative, in the Frobenius norm: a few roundings of a result."""


def leaves(*shapes: tuple[int, ...], dtype: Any = torch.bfloat16) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for shape in shapes]


def close(actual: Any, expected: Any) -> bool:
    assert actual.shape == expected.shape
    distance = (actual.double() - expected.double()).norm()
    return bool(distance <= TOLERANCE[actual.dtype] * expected.double().norm())


def check(function: Any, expected: Any, tensors: list[Any]) -> None:
    """The result and the gradients of all tensors."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    ours, theirs = function(*tensors), expected(*doubles)
    assert close(ours, theirs)
    grad = torch.randn_like(ours)
    pairs = zip(
        torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(theirs, doubles, grad.double()), strict=True
    )
    assert all(close(one, other) for one, other in pairs)


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("tokens", [[1, 1, 1], [3, 0, 130]], ids=["even", "uneven"])
def test_latent_attention(tokens: list[int], neighbours: bool) -> None:
    """Over pages, beside a softmax in float64; of caches that are slices of one tensor, and of others."""
    keys, size, hdims, heads = [200, 0, 1021], 16, (512, 64), 20
    counts = [-(-count // size) for count in keys]
    cache, q = (tensor.detach() for tensor in leaves((sum(counts), size, sum(hdims)), (sum(tokens), heads, sum(hdims))))
    parts = cache.split(hdims, dim=-1) if neighbours else [part.contiguous() for part in cache.split(hdims, dim=-1)]
    pages = torch.randperm(sum(counts), device="cuda").int()

    def starts(lengths: list[int]) -> Any:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()

    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, device="cuda"))
    lengths, scale = torch.tensor(keys, dtype=torch.int32), sum(hdims) ** -0.5
    wrapper.plan(starts(tokens), starts(counts), pages, lengths, heads, *hdims, size, True, scale, q.dtype, q.dtype)
    o = wrapper.run(*q.split(hdims, dim=-1), *parts)
    wanted = []
    for queries, numbers, count in zip(q.double().split(tokens), pages.split(counts), keys, strict=True):
        k = cache[numbers.long()].flatten(0, 1)[:count].double()
        scores = torch.einsum("qhd,kd->hqk", queries, k) * scale
        seen = torch.ones(len(queries), count, device="cuda").tril(count - len(queries)).bool()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        wanted.append(torch.einsum("hqk,kd->qhd", weights, k[:, : hdims[0]]))
    assert close(o, torch.cat(wanted))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "inner", "outer"), [((3, 70), 264, 520), ((), 1031, 257), ((700,), 4096, 136)])
def test_linear_and_its_gradients(dtype: Any, rows: tuple[int, ...], inner: int, outer: int) -> None:
    tensors = leaves((*rows, inner), (outer, inner), (outer,), dtype=dtype)
    check(linear, functional.linear, tensors)
    with torch.no_grad():
        x, weight, bias = tensors
        expected = functional.linear(x.double(), weight.double(), bias.double())
        for word, function in ACTIVATIONS.items():
            assert close(linear(x, weight, bias, word), function(expected))


@pytest.mark.parametrize(
    ("a", "b"), [((300, 200), (200, 100)), ((5, 64, 72), (72, 40)), ((2, 1, 33, 40), (3, 40, 24)), ((40,), (40, 9))]
)
def test_matmul_and_its_gradients(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(matmul, torch.matmul, leaves(a, b))
    if len(a) == len(b) == 2:
        check(lambda a, b: matmul(a.mT, b.mT), lambda a, b: torch.matmul(a.mT, b.mT), leaves(a[::-1], b[::-1]))
        wide = leaves(tuple(2 * size + 1 for size in a), b)
        check(
            lambda a, b: matmul(a[::2, 1::2][: a.shape[0] // 2], b),
            lambda a, b: a[::2, 1::2][: a.shape[0] // 2] @ b,
            wide,
        )


@pytest.mark.parametrize(
    ("ours", "theirs", "shapes", "options"),
    [
        (conv2d, functional.conv2d, ((2, 64, 17, 20), (96, 64, 3, 3)), {"padding": 1}),
        (conv2d, functional.conv2d, ((2, 3, 33, 30), (32, 3, 7, 7)), {"padding": 3, "stride": 2}),
        (conv2d, functional.conv2d, ((2, 64, 14, 14), (64, 8, 3, 3)), {"padding": 1, "groups": 8}),
        (conv2d, functional.conv2d, ((2, 40, 14, 14), (40, 1, 5, 5)), {"padding": "same", "groups": 40}),
        (conv1d, functional.conv1d, ((3, 72, 130), (48, 36, 4)), {"dilation": 2, "groups": 2}),
        (conv3d, functional.conv3d, ((2, 32, 6, 8, 7), (24, 32, 3, 3, 3)), {"padding": 1, "stride": (1, 2, 1)}),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_convolutions_and_their_gradients(
    ours: Any, theirs: Any, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], last: bool
) -> None:
    x, weight = shapes
    tensors = leaves(x, weight, weight[:1])
    if last and len(x) == 4:
        tensors[:2] = [one.detach().to(memory_format=torch.channels_last).requires_grad_() for one in tensors[:2]]
    check(lambda *given: ours(*given, **options), lambda *given: theirs(*given, **options), tensors)


ENDS = (40, 40, 300, 391)


def groups64(a: Any, b: Any) -> Any:
    starts = (0, *ENDS[:-1])
    parts = [a[start:end] @ b[i] for i, (start, end) in enumerate(zip(starts, ENDS, strict=True))]
    return torch.cat([*parts, a.new_zeros(len(a) - ENDS[-1], b.shape[-1])])


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(391, 264, 520), (400, 131, 72)])
def test_groups_and_their_gradients(rows: int, inner: int, outer: int, by_columns: bool) -> None:
    offs = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    tensors = leaves((rows, inner), (len(ENDS), *((outer, inner) if by_columns else (inner, outer))))

    def of(function: Any) -> Any:
        return lambda a, b: function(a, b.mT if by_columns else b)

    check(of(lambda a, b: grouped_mm(a, b, offs)), of(groups64), tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_of_rows_and_of_blocks(dtype: Any) -> None:
    m, n, k = 200, 384, 512
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Any:
        return (4 * torch.randn(shape, device="cuda", generator=generator)).to(dtype)

    def scales(*shape: int) -> Any:
        return torch.rand(shape, device="cuda", generator=generator) + 0.5

    a, b = drawn(m, k), drawn(n, k)
    of_rows, of_columns = scales(m), scales(n)
    expected = (a.double() * of_rows[:, None]) @ (b.double() * of_columns[:, None]).mT
    assert close(scaled_mm(a, b.mT, of_rows, of_columns), expected)
    in_a, in_b = scales(m, k // 128), scales(n // 128, k // 128)
    wide_b = in_b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (a.double() * in_a.double().repeat_interleave(128, 1)) @ (b.double() * wide_b).mT
    assert close(scaled_mm(a, b.mT, in_a, in_b.mT), expected)


def layers(x: Any, *weights: Any) -> Any:
    for weight in weights:
        x = linear(x, weight, None, "silu") * 2
        x = matmul(x, weight)
    return x


@pytest.fixture
def tensors() -> list[Any]:
    """For the layers, whose results stay in the range of the type."""
    return [one.detach() * 0.1 for one in leaves((9, 512), *[(1024, 512)] * 4)]


def test_products_that_follow_each_other_are_the_same_bits_in_every_run(tensors: list[Any]) -> None:
    first = layers(*tensors)
    x, *weights = (one.double() for one in tensors)
    for weight in weights:
        x = functional.silu(x @ weight.mT) * 2 @ weight
    assert (first.double() - x).norm() < 3e-2 * x.norm()
    for _ in range(20):
        assert torch.equal(layers(*tensors), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(*tensors)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)


def test_compiled_graphs_keep_the_operator(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.requires_grad_()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    results = [function(*tensors) for function in (compiled, layers)]
    assert close(*results)
    grads = zip(*(torch.autograd.grad(result.sum(), tensors) for result in results), strict=True)
    assert all(close(one, other) for one, other in grads)


def test_compiled_calls_on_streams_and_in_graphs(between_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and its gradients, many times and on several streams, and as a graph that is replayed on new values."""
    monkeypatch.setattr(native, "folder", lambda: between_runs / "torch")
    compile_calls()

    def step(tensors: list[Any], grad: Any) -> list[Any]:
        o = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        return [o, *torch.autograd.grad(o, tensors, grad)]

    def agree(found: list[Any], tensors: list[Any], grad: Any) -> bool:
        doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
        o = functional.scaled_dot_product_attention(*doubles, is_causal=True, enable_gqa=True)
        expected = [o, *torch.autograd.grad(o, doubles, grad.double())]
        return all(close(one, other) for one, other in zip(found, expected, strict=True))

    tensors = leaves((2, 8, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64))
    grad = torch.randn_like(tensors[0])
    current, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(3)]
    for call in range(24):
        stream = streams[call % len(streams)]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found = step(tensors, grad)
            assert agree(found, tensors, grad), call
        current.wait_stream(stream)
    assert found[0].grad_fn.name() == "CatalogBackward"

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, grad)
    with torch.no_grad():
        for tensor in (*tensors, grad):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert agree(captured, tensors, grad)


def test_autocast() -> None:
    x, weight = (one.float() for one in leaves((8, 64), (32, 64)))
    with torch.autocast("cuda", torch.bfloat16):
        assert close(linear(x, weight), functional.linear(x.double(), weight.double()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: linear(x.float(), x.float()), "torch.matmul may do"),
        (lambda x: conv2d(x.float()[None, None], x.float()[None, None, :3, :3]), "torch.nn.functional.conv2d"),
    ],
)
def test_what_no_kernel_computes_is_a_message(call: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        call(leaves((4, 16))[0].detach())
