"""Rows of AMD arches without a HIP compiler: sources from made-up checkouts, and our shim around made-up launchers.

The launchers stand for CK's: they have the shape that upstream's generator writes, take structs with fields of two
revisions, and are compiled for the CPU with a HIP of a few functions.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import slow_but
from test_live import make_checkout

from catalog.build.resources import Resources, of_hip_build
from catalog.build.targets import HEADERS
from catalog.errors import BuildError
from catalog.ops import operation
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.kernels.ck.emit import emit_generated, emit_row
from catalog.ops.attention.kernels.ck.headers import all_headers
from catalog.ops.attention.upstream.sources import Checkout, ck_facts, find_checkout, open_checkout
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog import Catalog
from catalog.schema.kernel import Kernel
from catalog.settings import settings

LIKE_CK = Path(__file__).with_name("ck_tile_like")
OK, BAD_ARGUMENT, DEVICE_ERROR = 0, 2, 4

WRITES = """
if args.output_dir:
    names = Path(__file__).with_name("names").read_text().split()
    asked = [part for part in args.filter.split("@") if part not in ("*", "none")]
    for name in names:
        if name in asked and (args.receipt, args.mask) == ("2", "generic"):
            (Path(args.output_dir) / (name + ".cpp")).write_text("// " + name)
    with open(Path(__file__).with_name("asked"), "a") as log:
        log.write(args.filter + " " + str(args.receipt) + "\\n")
"""
OPTIONS = 'parser.add_argument("-o", "--output_dir")\n'


@pytest.fixture(scope="module")
def rows(populated: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog of gfx90a at the revision whose generator takes no targets."""
    made = populated("gfx90a", "2025-07", receipts=(0, 2))
    return Catalog(shutil.copy(made, tmp_path_factory.mktemp("rows") / "catalog.db"))


def row(catalog: Catalog, where: str) -> Kernel:
    return catalog.kernels(f"revision = '2025-07' AND {where}", arch="gfx90a", limit=1)[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = make_checkout(tmp_path / "ck", "", targets=False)
    generator = root / "example" / "ck_tile" / "01_fmha" / "generate.py"
    generator.write_text(generator.read_text().replace("args = parser", f"{OPTIONS}args = parser") + WRITES)
    (root / "include" / "ck_tile").mkdir(parents=True)
    return open_checkout(root)


# Sources


@pytest.mark.parametrize(
    "family", slow_but(["fwd"], ["fwd", "fwd_splitkv", "fwd_splitkv_combine", "bwd_dot_do_o", "bwd_dq_dk_dv"])
)
def test_the_generator_is_asked_for_one_kernel_once(
    family: str, rows: Catalog, checkout: Checkout, tmp_path: Path
) -> None:
    kernel = row(rows, f"family = '{family}'")
    (checkout.example / "names").write_text(kernel.name)
    assert checkout.source(kernel, tmp_path) == f"// {kernel.name}"
    assert checkout.source(kernel, tmp_path) == f"// {kernel.name}"
    asked = (checkout.example / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["0", "1", "2"], "one receipt after the other, once"
    assert all(kernel.name in line for line in asked)


def test_a_checkout_without_the_kernel_says_so(rows: Catalog, checkout: Checkout, tmp_path: Path) -> None:
    kernel = row(rows, "family = 'fwd'")
    (checkout.example / "names").touch()
    with pytest.raises(BuildError, match=rf"knows no kernel {kernel.name}.*revision 2025-07"):
        checkout.source(kernel, tmp_path)
    with pytest.raises(BuildError, match=r"is of revision 2026-05.*is detected as revision 2025-07"):
        checkout.source(kernel.model_copy(update={"revision": "2026-05"}), tmp_path)
    assert not list(tmp_path.glob("*.cpp"))


def test_filters_leave_out_the_target(rows: Catalog, tmp_path: Path) -> None:
    """Names of newer generators end in the target, but not where they compare them with the filter."""
    root = make_checkout(tmp_path / "ck", WRITES)
    generator = root / "example" / "ck_tile" / "01_fmha" / "generate.py"
    writes = generator.read_text().replace("args = parser", f"{OPTIONS}args = parser").replace('".cpp"', '"_gfx9.cpp"')
    generator.write_text(writes)
    (root / "include" / "ck_tile").mkdir(parents=True)
    kernel = row(rows, "family = 'fwd'").model_copy(update={"revision": "2026-05", "target": "gfx9"})
    generator.with_name("names").write_text(kernel.name.removesuffix("_gfx9"))
    assert open_checkout(root).source(kernel, tmp_path).startswith("// fmha_fwd_d")


def test_a_generator_that_fails_is_a_failed_build(rows: Catalog, checkout: Checkout, tmp_path: Path) -> None:
    (checkout.example / "generate.py").write_text("raise SystemExit('out of order')")
    with pytest.raises(BuildError, match="out of order"):
        replace(checkout).source(row(rows, "family = 'fwd'"), tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_where_a_checkout_has_to_be(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATALOG_ROCM_PATH", str(tmp_path))
    if there:
        monkeypatch.setenv("CATALOG_CK_ROOT", str(make_checkout(tmp_path / "ck")))
    settings.cache_clear()
    with pytest.raises(BuildError, match="include/ck_tile" if there else "CATALOG_CK_ROOT or --ck-root"):
        find_checkout()
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize(("arch", "revision"), [("gfx90a", "2025-07"), ("gfx1201", "2025-11"), ("gfx1100", "2026-05")])
def test_every_arch_has_the_fallback_kernel(arch: str, revision: str, tmp_path: Path) -> None:
    """GPUs with matrix instructions of waves of 32 have other pipelines and tiles."""
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.populate(arch, revision=revision, restriction=Restriction(where=ck_facts().fallback, families=("fwd",)))
    assert {kernel.signature.hdim_q for kernel in catalog.kernels("", arch=arch)} == {128}


# Rows of sweeps


@pytest.mark.parametrize("revision", ["2025-07", "2025-11"])
def test_headers_are_recognised_by_their_files(revision: str, checkout: Checkout) -> None:
    for name in all_headers()[revision].has:
        file = checkout.include / "ck_tile" / "ops" / "fmha" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert checkout.headers == revision
    with pytest.raises(BuildError, match=r"none of the revisions 2025-07, 2025-11"):
        replace(checkout, include=checkout.example).headers  # noqa: B018


@pytest.mark.parametrize(
    ("of", "traits", "lacks"),
    [
        ("2025-07", {"dtype": "fp32"}, "dtype = fp32"),
        ("2025-07", {"pipeline": "qr_async_trload"}, "pipeline = qr_async_trload"),
        ("2025-11", {"pipeline": "qr_async_trload_v3"}, "pipeline = qr_async_trload_v3"),
        ("2025-11", {"sink": True}, "sink = True"),
        ("2025-11", {"qscale": "blockscale"}, "qscale = blockscale"),
    ],
)
def test_a_row_that_the_headers_do_not_implement_is_refused(
    of: str, traits: dict[str, object], lacks: str, rows: Catalog
) -> None:
    kernel = AttentionKernel.from_row(row(rows, "family = 'fwd'").to_row() | {"revision": "2026-05"} | traits)
    with pytest.raises(BuildError, match=f"headers of {of} have no {lacks}"):
        emit_row(kernel, of)


# The shim

FORWARD = """
struct fmha_fwd_args {
    const void *q_ptr, *k_ptr, *v_ptr, *bias_ptr;
    void *lse_ptr, *o_ptr;
    ck_tile::index_t seqlen_q, batch, max_seqlen_q, stride_q, nhead_stride_k, batch_stride_v, stride_bias;
    ck_tile::index_t window_size_left, window_size_right, mask_type;
    float scale_s, scale_p, scale_o, p_drop;
    bool s_randval;
    drop_seed_offset_t drop_seed_offset;
};
template <class Traits> float fmha_fwd_(const ck_tile::stream_config&, fmha_fwd_args);
using trait_0 = int;
static fmha_fwd_args last;
template<>
float fmha_fwd_<trait_0>(const ck_tile::stream_config& s, fmha_fwd_args a)
{
    if (a.batch == 99) throw std::runtime_error("hip error");
    last = a;
    return 0;
}
extern "C" __attribute__((visibility("default"))) void read_last(double* to) {
    double numbers[] = {double(last.seqlen_q), double(last.stride_q), double(last.nhead_stride_k),
        double(last.batch_stride_v), double(last.stride_bias), double(last.mask_type), last.scale_s, last.scale_o,
        double(last.max_seqlen_q), double(last.drop_seed_offset.index()), double(last.s_randval)};
    std::memcpy(to, numbers, sizeof numbers);
}
"""

# Another revision: long strides, factors read by the kernel, no window, a launcher with more template arguments.
NEWER = (
    FORWARD.replace("ck_tile::index_t seqlen_q,", "const void *q_descale_ptr; std::int64_t sink_size, seqlen_q,")
    .replace(
        "    ck_tile::index_t window_size_left, window_size_right, mask_type;\n", "    ck_tile::index_t mask_type;\n"
    )
    .replace("template <class Traits> float", "template <class Traits, class Arch = void> float")
    .replace("fmha_fwd_<trait_0>(", "fmha_fwd_<trait_0, ck_tile::index_t>(")
)

BACKWARD = """
struct fmha_bwd_args {
    const void *q_ptr, *do_ptr, *d_ptr;
    void* dq_acc_ptr;
    ck_tile::index_t seqlen_k, nhead_stride_lsed, split_stride_dq_acc;
    float scale, p_undrop;
};
template <class Traits> void fmha_bwd_dq_dk_dv_oneshot_(const ck_tile::stream_config&, fmha_bwd_args);
using dq_dk_dv_trait_0 = int;
template <>
void fmha_bwd_dq_dk_dv_oneshot_<dq_dk_dv_trait_0>(const ck_tile::stream_config& s,
                                                  fmha_bwd_args a)
{
    *static_cast<float*>(a.dq_acc_ptr) += 1;
}
"""

# A newer one says what its workspace is: 8 bytes that the host prepares, then dQ.
BACKWARD_WITH_WORKSPACE = """
struct fmha_bwd_args { void* workspace_ptr; ck_tile::index_t seqlen_k; };
template <class Traits, class Arch> float fmha_bwd_dq_dk_dv_(const ck_tile::stream_config&, fmha_bwd_args);
template <class Traits, class Arch> size_t fmha_bwd_dq_dk_dv_dq_ws_host_size_(int);
template <class Traits, class Arch> size_t fmha_bwd_dq_dk_dv_dq_ws_device_upper_bound_(
    ck_tile::index_t, ck_tile::index_t, ck_tile::index_t, ck_tile::index_t, ck_tile::index_t);
template <class Traits, class Arch> size_t fmha_bwd_dq_dk_dv_dq_prepare_ws_host_(void*, ck_tile::index_t,
    ck_tile::index_t, ck_tile::index_t, ck_tile::index_t, ck_tile::index_t,
    const ck_tile::index_t*, const ck_tile::index_t*);
template <class Traits, class Arch> bool fmha_bwd_dq_dk_dv_needs_zero_dq_acc_();
using trait_3 = int;
using gfx = short;
template <>
float fmha_bwd_dq_dk_dv_<trait_3, gfx>(const ck_tile::stream_config& s, fmha_bwd_args a)
{
    return static_cast<float*>(a.workspace_ptr)[2] += 1;
}
template <> size_t fmha_bwd_dq_dk_dv_dq_ws_host_size_<trait_3, gfx>(int batch) { return 4 * batch; }
template <> size_t fmha_bwd_dq_dk_dv_dq_ws_device_upper_bound_<trait_3, gfx>(ck_tile::index_t batch,
    ck_tile::index_t hdim_q, ck_tile::index_t nhead_q, ck_tile::index_t tokens, ck_tile::index_t seqlen_k)
{
    return 4 * hdim_q * nhead_q * tokens * (batch && seqlen_k);
}
template <> size_t fmha_bwd_dq_dk_dv_dq_prepare_ws_host_<trait_3, gfx>(void* to, ck_tile::index_t batch,
    ck_tile::index_t, ck_tile::index_t, ck_tile::index_t seqlen_q, ck_tile::index_t,
    const ck_tile::index_t* starts_q, const ck_tile::index_t* starts_k)
{
    for (int b = 0; b < batch; ++b)
        static_cast<std::int32_t*>(to)[b] = starts_q ? starts_q[b + 1] + 10 * starts_k[b + 1] : seqlen_q;
    return 0;
}
template <> bool fmha_bwd_dq_dk_dv_needs_zero_dq_acc_<trait_3, gfx>() { return true; }
"""

APPEND = """
struct fmha_fwd_appendkv_args {
    void *q_ptr;
    ck_tile::index_t stride_q, nhead_stride_q, batch_stride_q, seqlen_knew;
};
template <class Traits> float fmha_fwd_appendkv_(const ck_tile::stream_config&, fmha_fwd_appendkv_args);
template<>
float fmha_fwd_appendkv_<int>(const ck_tile::stream_config& s, fmha_fwd_appendkv_args a)
{
    static_cast<short*>(a.q_ptr)[a.stride_q] = 7;
    return 0;
}
"""


def compiled(kernel: Kernel, launcher: str, folder: Path) -> ctypes.CDLL:
    """The library of the shim around a launcher, for the CPU."""
    return library_of(kernel, emit_generated(kernel, f'#include "ck_tile/core.hpp"\n{launcher}'), folder)


def library_of(kernel: Kernel, source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    library = compiled_for_cpu(source, folder, *flags)
    library.catalog_describe.restype = ctypes.c_char_p
    assert json.loads(library.catalog_describe())["id"] == kernel.id
    return library


def compiled_for_cpu(
    source: str, folder: Path, *flags: str, headers: Mapping[str, Path] = operation().headers
) -> ctypes.CDLL:
    (folder / "kernel.cpp").write_text(source)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", *flags]
    command += [
        f"-I{LIKE_CK}",
        *(f"-I{folder}" for folder in (*HEADERS.values(), *headers.values())),
        "kernel.cpp",
        "-o",
        "kernel.so",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernel.so"))


def arguments(**fields: object) -> ctypes.Structure:
    return ARGUMENTS.new(batch=2, **fields)


def size_of(library: ctypes.CDLL, args: ctypes.Structure) -> tuple[int, ...]:
    """The splits that a launch takes, and the bytes of o_acc, lse_acc, delta and dq_acc."""
    size = ARGUMENTS.workspace()
    assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(size)) == OK
    return tuple(getattr(size, name) for name, _ in ARGUMENTS.workspace._fields_)


@pytest.mark.parametrize("launcher", [FORWARD, NEWER], ids=["2025-07", "newer"])
@pytest.mark.parametrize("alibi", slow_but([True], [False, True]))
def test_a_forward_gets_the_fields_that_its_revision_has(
    launcher: str, alibi: bool, rows: Catalog, tmp_path: Path
) -> None:
    bias = "alibi" if alibi else "no"
    kernel = row(rows, f"family = 'fwd' AND dtype = 'fp16' AND bias = '{bias}' AND mask = 'causal' AND mode = 'batch'")
    library = compiled(kernel, launcher, tmp_path)
    args = arguments(seqlen_q=5, scale=0.5, mask_corner=1, window_left=-1)
    args.q.stride_seqlen, args.k.stride_nhead, args.v.stride_batch = 128, 256, 512
    args.bias.stride_seqlen, args.alibi_slopes.stride_batch = 64, 8
    state = (ctypes.c_uint64 * 2)(1, 2)
    args.rng_state.data = ctypes.addressof(state)
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    read = (ctypes.c_double * 11)()
    library.read_last(read)
    assert list(read) == [5, 128, 256, 512, 8 if alibi else 64, 2, 0.5, 1, 5, 1, 0]

    args.rng_state.data, args.mask_corner = None, 0
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    library.read_last(read)
    assert (read[5], read[9]) == (1, 0), "top left, and a seed of numbers"

    args.q.stride_seqlen = 2**40
    wide = launcher is NEWER
    assert library.catalog_launch(ctypes.byref(args), None) == (OK if wide else BAD_ARGUMENT), "bits of the field"
    assert library.catalog_launch(ctypes.byref(arguments()), None) == OK
    args = arguments()
    args.batch = 99
    assert library.catalog_launch(ctypes.byref(args), None) == DEVICE_ERROR, "an exception of the launcher"
    args.abi_version += 1
    assert library.catalog_launch(ctypes.byref(args), None) == 1


def test_a_quantised_forward_folds_the_factors_in(rows: Catalog, tmp_path: Path) -> None:
    kernel = row(rows, "family = 'fwd' AND qscale = 'pertensor'")
    library = compiled(kernel, FORWARD, tmp_path)
    factors = (ctypes.c_float * 3)(2, 4, 64)
    args = arguments(scale=0.5)
    for place, tensor in enumerate((args.q_descale, args.k_descale, args.v_descale)):
        tensor.data = ctypes.addressof(factors) + 4 * place
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    read = (ctypes.c_double * 11)()
    library.read_last(read)
    assert (read[6], read[7]) == (4.0, 0.5)


@pytest.mark.slow
def test_a_backward_starts_from_zeros_and_insists_on_room(rows: Catalog, tmp_path: Path) -> None:
    kernel = row(rows, "family = 'bwd_dq_dk_dv' AND deterministic")
    library = compiled(kernel, BACKWARD, tmp_path)
    dq_acc = (ctypes.c_float * 6)(*[3] * 6)
    args = arguments(seqlen_k=2 * kernel.algorithm.tile_n0, num_splits=2)
    args.dq_acc.data, args.dq_acc.stride_split = ctypes.addressof(dq_acc), 2
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    assert list(dq_acc) == [1, 0, 0, 0, 3, 3]
    args.dlse.data = args.dq_acc.data
    assert library.catalog_launch(ctypes.byref(args), None) == BAD_ARGUMENT, "CK would leave it out"
    args.dlse.data, args.p_drop = None, 1.0
    assert library.catalog_launch(ctypes.byref(args), None) == BAD_ARGUMENT, "CK would multiply by infinity"
    args.p_drop, args.num_splits = 0.0, 1
    assert library.catalog_launch(ctypes.byref(args), None) == BAD_ARGUMENT
    args = arguments(seqlen_k=2 * kernel.algorithm.tile_n0 + 1, nhead_q=3, tokens_q=10, hdim_q=7, num_splits=1)
    assert size_of(library, args) == (3, 0, 0, 4 * 2 * 3 * 5, 3 * 4 * 2 * 3 * 5 * 7), "a split for each tile of keys"
    args.tokens_q = 2**62
    assert library.catalog_workspace_size(ctypes.byref(args), ctypes.byref(ARGUMENTS.workspace())) == BAD_ARGUMENT

    kernel = row(rows, "family = 'bwd_dq_dk_dv' AND NOT deterministic")
    (folder := tmp_path / "atomic").mkdir()
    library = compiled(kernel, BACKWARD, folder)
    assert size_of(library, arguments(seqlen_k=900, num_splits=8))[0] == 1, "all add to one"


@pytest.mark.parametrize("packed", slow_but([True], [False, True]))
def test_a_backward_with_a_workspace_of_its_own_gets_it_prepared(packed: bool, rows: Catalog, tmp_path: Path) -> None:
    library = compiled(row(rows, "family = 'bwd_dq_dk_dv'"), BACKWARD_WITH_WORKSPACE, tmp_path)
    tokens = 4 if packed else 6
    args = arguments(nhead_q=1, seqlen_q=3, seqlen_k=4, hdim_q=1, num_splits=1, tokens_q=tokens)
    assert size_of(library, args)[-1] == 8 + 4 * tokens, "the host's part, then dQ"
    starts_q, starts_k = (ctypes.c_int32 * 3)(0, 1, 4), (ctypes.c_int32 * 3)(0, 4, 6)
    if packed:
        args.seqstart_q, args.seqstart_k = ctypes.addressof(starts_q), ctypes.addressof(starts_k)
    workspace = (ctypes.c_float * 9)(*[5] * 9)
    assert library.catalog_launch(ctypes.byref(args), None) == BAD_ARGUMENT, "none was given"
    args.dq_acc.data = ctypes.addressof(workspace)
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    prepared = ctypes.cast(workspace, ctypes.POINTER(ctypes.c_int32))
    assert prepared[:2] == ([1 + 40, 4 + 60] if packed else [3, 3])
    assert list(workspace)[2:] == [1, *[0] * (tokens - 1), *[5] * (7 - tokens)]


def test_an_append_rotates_a_copy(rows: Catalog, tmp_path: Path) -> None:
    library = compiled(row(rows, "family = 'fwd_appendkv' AND dtype = 'fp16'"), APPEND, tmp_path)
    q, q_out = (ctypes.c_int16 * 8)(*range(8)), (ctypes.c_int16 * 16)()
    args = arguments(nhead_q=1, seqlen_q=2, hdim_q=2)
    for tensor, array, stride in ((args.q, q, 2), (args.q_out, q_out, 4)):
        tensor.data, tensor.stride_seqlen, tensor.stride_batch = ctypes.addressof(array), stride, 2 * stride
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    assert list(q) == list(range(8))
    assert list(q_out) == [0, 1, 0, 0, 7, 3, 0, 0, 4, 5, 0, 0, 6, 7, 0, 0]


def test_a_source_without_a_launcher_is_refused(rows: Catalog) -> None:
    with pytest.raises(BuildError, match="defines no launcher"):
        emit_generated(row(rows, "family = 'fwd'"), "template <> float other(int);")


@pytest.mark.parametrize("revision", slow_but(["2025-11"], ["2025-07", "2025-11"]))
def test_a_row_becomes_an_instance_of_the_headers_templates(revision: str, rows: Catalog, tmp_path: Path) -> None:
    where = "family = 'bwd_dot_do_o' AND dtype = 'fp16' AND mode = 'group' AND hdim_q = 128 AND pad_s AND NOT pad_dv"
    kernel = row(rows, where)
    library = library_of(kernel, emit_row(kernel, revision), tmp_path, f"-DLIKE_{revision.replace('-', '_')}")
    args = arguments(seqlen_q=5)
    seen = (ctypes.c_int * 5)()
    args.delta.data = ctypes.addressof(seen)
    assert library.catalog_launch(ctypes.byref(args), None) == OK
    assert list(seen) == [64, 128, True, 2 * True + False, 2], (
        "queries of a block, head dim, ragged, padding, occupancy"
    )


@pytest.mark.parametrize("revision", ["2025_07", "2025_11"])
def test_the_third_warp_tile_of_a_backward_is_that_of_dq(revision: str, tmp_path: Path) -> None:
    source = f"""
#include "ck/rows/headers_{revision}.hpp"
struct Row {{ static constexpr int max_seq_q = 0; }};
template <int> struct Warp {{}};
using Shape = catalog::ck::Headers::BackwardShape<Row, void, void, void, void, Warp<0>, Warp<1>, Warp<2>>;
static_assert(std::is_same_v<Shape::Gemm4WarpTile, Warp<2>>);
"""
    compiled_for_cpu(source, tmp_path, f"-DLIKE_{revision}")


# What a compiler reports about a library

REMARKS = """
a.hpp:29:1: remark: Function Name: _Z1av [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     {sgprs}: 68 [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     VGPRs: {vgprs} [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     AGPRs: 4 [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     ScratchSize [bytes/lane]: 16 [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     Dynamic Stack: False [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     Occupancy [waves/SIMD]: {occupancy} [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     SGPRs Spill: 1 [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     VGPRs Spill: {spilled} [-Rpass-analysis=kernel-resource-usage]
a.hpp:29:1: remark:     LDS Size [bytes/block]: 32768 [-Rpass-analysis=kernel-resource-usage]
"""


@pytest.mark.parametrize("sgprs", slow_but(["TotalSGPRs"], ["SGPRs", "TotalSGPRs"]))
def test_the_worst_kernel_of_a_library_counts(sgprs: str, rows: Catalog, tmp_path: Path) -> None:
    compiled(row(rows, "family = 'fwd_appendkv' AND dtype = 'fp16'"), APPEND, tmp_path)
    first = REMARKS.format(sgprs=sgprs, vgprs=60, occupancy=8, spilled=0)
    second = REMARKS.format(sgprs=sgprs, vgprs=256, occupancy=1, spilled=5)
    assert of_hip_build(tmp_path, first + second) == Resources(
        registers=256,
        acc_registers=4,
        scalar_registers=68,
        spills=6,
        scratch_bytes=16,
        shared_bytes=32768,
        occupancy=1,
        device_functions=2,
    )
