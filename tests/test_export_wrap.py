"""Folders of generated headers as libraries: headers in the shape that upstream's dispatcher writes, made up."""

from __future__ import annotations

import ctypes
import json
from functools import partial
from pathlib import Path

import command
import pytest
from build_tools import build, library

from catalog.backends import target_of, toolset_of
from catalog.build.export import wrap
from catalog.build.export.headers import read_header
from catalog.build.export.projects import ProjectFormat
from catalog.errors import BuildError, UsageError
from catalog.runtime.here import resolve_arch

wrap_headers = partial(wrap.wrap_headers, targets=target_of, toolsets=toolset_of)

CORE = """
#pragma once
#include <stdexcept>
namespace ck_tile {
struct stream_config { int stream_id_ = 0; float tick_ = 0; };
struct Args { const float* in; float* out; int count; };
inline float scaled(const Args& args, const stream_config& stream, float factor) {
    if (args.count < 0) throw std::runtime_error("not supported");
    for (int i = 0; i < args.count; ++i) args.out[i] = factor * args.in[i];
    return stream.tick_;
}
}
"""

GEMM = """
// Has braces { in a comment, and "quotes".
#pragma once
#include "ck_tile/core.hpp"
using namespace ck_tile;

namespace ns_gemm_fp16_rcr_compv3 {
constexpr const char* KERNEL_NAME = "gemm_fp16_rcr_compv3";
using ADataType = float;
struct Kernel_gemm_fp16_rcr_compv3 {
    static constexpr int TileM = 128;
    static float launch(const Args& args, const stream_config& stream) { return scaled(args, stream, 2); }
};
using SelectedKernel = Kernel_gemm_fp16_rcr_compv3;
using SelectedKernelLauncher = Kernel_gemm_fp16_rcr_compv3;
} // namespace

#ifdef CK_TILE_SINGLE_KERNEL_INCLUDE
using SelectedKernel = ns_gemm_fp16_rcr_compv3::SelectedKernel;
constexpr const char* KERNEL_NAME = ns_gemm_fp16_rcr_compv3::KERNEL_NAME;
#endif
"""

QUANT = """
#pragma once
#include "ck_tile/core.hpp"
constexpr const char* KERNEL_NAME = "%(name)s";
struct SelectedKernel {
    static float launch(const ck_tile::Args& args, const ck_tile::stream_config& stream) {
        return ck_tile::scaled(args, stream, %(factor)s);
    }
};
"""

MULTI_D = """
#include "ck_tile/core.hpp"
namespace ns_gemm_multi_d {
struct Kernel_gemm_multi_d {
    static float launch(const int& args, const ck_tile::stream_config&) { return static_cast<float>(args); }
    static float launch(const ck_tile::Args&, const ck_tile::stream_config&) { return 0; }
};
using SelectedKernel = Kernel_gemm_multi_d;
}
"""

CONV = """
#pragma once
#include "ck_tile/core.hpp"
using namespace ck_tile;
struct grouped_conv_fwd_fp16_2d_Config { static constexpr int N_Tile = 64; };
namespace ns_grouped_conv_fwd_fp16_2d {
using Config = grouped_conv_fwd_fp16_2d_Config;
constexpr const char* CONV_FWD_KERNEL_NAME = "grouped_conv_fwd_fp16_2d";
using SelectedConvFwdKernel = Config;
struct grouped_conv_fwd_fp16_2d_Launcher {
    static float launch(const Args& args, const stream_config& s) { return scaled(args, s, 3); }
    static bool is_supported(int k_batch) { return k_batch == 1; }
};
using SelectedConvKernelLauncher = grouped_conv_fwd_fp16_2d_Launcher;
}
using grouped_conv_fwd_fp16_2d_Launcher = ns_grouped_conv_fwd_fp16_2d::grouped_conv_fwd_fp16_2d_Launcher;
"""

FMHA = """
#pragma once
#include "ck_tile/core.hpp"
#if !defined(__HIP_DEVICE_COMPILE__) || (defined(__gfx942__))
template <class Trait> float fmha_fwd_(const ck_tile::stream_config& s, ck_tile::Args a);
namespace ns_fmha_fwd_d128_fp16_batch {
struct trait {};
}
template <>
inline float fmha_fwd_<ns_fmha_fwd_d128_fp16_batch::trait>(const ck_tile::stream_config& s, ck_tile::Args a) {
    return ck_tile::scaled(a, s, 5);
}
namespace ns_fmha_fwd_d128_fp16_batch {
inline float run(const ck_tile::stream_config& s, ck_tile::Args a) { return fmha_fwd_<trait>(s, a); }
inline void launch(const ck_tile::stream_config& s, ck_tile::Args a) { (void)fmha_fwd_<trait>(s, a); }
}
#endif
"""

FMHA_BWD = """
#pragma once
#include "ck_tile/core.hpp"
namespace ns_fmha_bwd_dot_do_o_d64 {
inline void launch(const ck_tile::stream_config& s, ck_tile::Args a) { ck_tile::scaled(a, s, 7); }
}
"""

HEADERS = {
    "gemm_fp16_rcr_compv3": GEMM,
    "gemm_tensor_quant_a": QUANT % {"name": "gemm_tensor_quant_a", "factor": 11},
    "gemm_tensor_quant_b": QUANT % {"name": "gemm_tensor_quant_b", "factor": 13},
    "gemm_multi_d": MULTI_D,
    "grouped_conv_fwd_fp16_2d": CONV,
    "fmha_fwd_d128_fp16_batch": FMHA,
    "fmha_bwd_dot_do_o_d64": FMHA_BWD,
    "something-else.v2": "inline int answer() { return 42; }\n",
}
FACTORS = {
    "gemm_fp16_rcr_compv3": 2,
    "gemm_tensor_quant_a": 11,
    "gemm_tensor_quant_b": 13,
    "grouped_conv_fwd_fp16_2d": 3,
    "fmha_fwd_d128_fp16_batch": 5,
    "fmha_bwd_dot_do_o_d64": 7,
}

ARCH = resolve_arch("host")


class Entry(ctypes.Structure):
    """PREFIX_kernel of the exported header."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("header", ctypes.c_char_p),
        ("launcher", ctypes.c_char_p),
        (
            "launch",
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)),
        ),
    )


class Args(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.POINTER(ctypes.c_float)),
        ("output", ctypes.POINTER(ctypes.c_float)),
        ("count", ctypes.c_int),
    )


class Stream(ctypes.Structure):
    _fields_ = (("stream_id", ctypes.c_int), ("tick", ctypes.c_float))


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """A folder of generated headers, at a path that every format has to escape."""
    folder = tmp_path / "it's $HOME generated"
    (folder / "ck_tile").mkdir(parents=True)
    (folder / "ck_tile" / "core.hpp").write_text(CORE)
    for name, text in HEADERS.items():
        (folder / f"{name}.hpp").write_text(text)
    return folder


def entries(path: Path) -> dict[str, Entry]:
    """The table of a library, by name."""
    opened = ctypes.CDLL(str(path))
    opened.made_kernels.restype = ctypes.POINTER(Entry)
    count = ctypes.c_size_t()
    table = opened.made_kernels(ctypes.byref(count))
    return {table[index].name.decode(): table[index] for index in range(count.value)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ProjectFormat, ids=[form.value for form in ProjectFormat])
def test_every_header_is_compiled_listed_by_name_and_launched(
    form: ProjectFormat, generated: Path, tmp_path: Path
) -> None:
    out = tmp_path / "my $HOME library"
    wrap_headers(generated, out, "made", form, arch=ARCH)
    compiled = build(form, out, CXXFLAGS="-Wall -Wextra -Werror")
    assert len(compiled) == len(HEADERS) + 1
    kernels = entries(library(form, out, "libmade.so"))
    assert list(kernels) == sorted(HEADERS)
    for name, entry in kernels.items():
        assert entry.header.decode() == f"{name}.hpp"
        assert bool(entry.launch) == (name in FACTORS), name

    numbers = (ctypes.c_float * 3)(1, 2, 3)
    for name, factor in FACTORS.items():
        written, milliseconds = (ctypes.c_float * 3)(), ctypes.c_float(-1)
        args = Args(numbers, written, 3)
        launch = kernels[name].launch
        assert launch(ctypes.addressof(args), ctypes.addressof(Stream(0, 0.25)), ctypes.byref(milliseconds)) == 0
        assert list(written) == [factor, 2 * factor, 3 * factor], name
        assert milliseconds.value == (0 if "bwd" in name else 0.25)
        args.count = -1
        assert launch(ctypes.addressof(args), ctypes.addressof(Stream()), None) == 1, "the kernel refuses it"

    (generated / "added.hpp").write_text("\n")
    wrap_headers(generated, out, "made", form, arch=ARCH)
    assert sorted(build(form, out, CXXFLAGS="-Wall -Wextra -Werror")) == ["kernels/added", "made_register"]
    with (generated / "fmha_bwd_dot_do_o_d64.hpp").open("a") as header:
        header.write("// changed\n")
    assert wrap_headers(generated, out, "made", form, arch=ARCH) == []
    assert build(form, out, CXXFLAGS="-Wall -Wextra -Werror") == ["kernels/fmha_bwd_dot_do_o_d64"]


@pytest.mark.parametrize(
    ("text", "name", "launcher"),
    [
        (GEMM, "gemm_fp16_rcr_compv3", "::ns_gemm_fp16_rcr_compv3::SelectedKernel"),
        (QUANT % {"name": 'say \\"a\\"', "factor": 1}, 'say "a"', "::SelectedKernel"),
        (MULTI_D, "gemm_multi_d", "::ns_gemm_multi_d::SelectedKernel"),
        (
            CONV,
            "grouped_conv_fwd_fp16_2d",
            "::ns_grouped_conv_fwd_fp16_2d::SelectedConvKernelLauncher",
        ),
        (FMHA, "fmha_fwd_d128_fp16_batch", "::ns_fmha_fwd_d128_fp16_batch::run"),
        (FMHA_BWD, "fmha_bwd_dot_do_o_d64", "::ns_fmha_bwd_dot_do_o_d64::launch"),
        ("namespace a::b { struct Kernel_x { static void launch(); }; }", "x", "::a::b::Kernel_x"),
        ("struct x_y_Launcher { };", "x_y", "::x_y_Launcher"),
        ('#define GEMM_KERNEL_NAME "macro"\n', "macro", None),
        ("struct SelectedKernel;", None, None),
        ("template <int N> struct Kernel_x {};", None, None),
        ("void body() { struct SelectedKernel {}; }", None, None),
        (
            '// struct SelectedKernel { KERNEL_NAME = "x"\n/* namespace ns_x { */ const char* a = "struct b {";',
            None,
            None,
        ),
        ("namespace ns_f { inline float run(int) { return 0; } inline float run(char) { return 0; } }", "f", None),
        ("inline float run(int a, int b) { return 0; }", None, None),
        ("", None, None),
    ],
)
def test_what_a_header_says_of_its_kernel(text: str, name: str | None, launcher: str | None) -> None:
    header = read_header(text)
    assert (header.name, header.type or header.function) == (name, launcher)


def test_the_inventory_says_what_was_found(generated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    wrap_headers(generated, out, "made", ProjectFormat.MAKE, arch=ARCH, pattern="fmha*.hpp")
    kernels = json.loads((out / "inventory.json").read_text())["kernels"]
    assert [(kernel["name"], kernel["launcher"]) for kernel in kernels] == [
        ("fmha_bwd_dot_do_o_d64", "::ns_fmha_bwd_dot_do_o_d64::launch"),
        ("fmha_fwd_d128_fp16_batch", "::ns_fmha_fwd_d128_fp16_batch::run"),
    ]
    assert "fmha_bwd_dot_do_o_d64.hpp includes headers of CK or HIP" in caplog.text


def test_headers_for_a_gpu_get_its_flags_and_places_as_variables(generated: Path, tmp_path: Path) -> None:
    wrap_headers(generated, tmp_path / "out", "made", ProjectFormat.MAKE, arch="gfx942")
    flags = (tmp_path / "out" / "flags.mk").read_text()
    assert "--offload-arch=gfx942" in flags
    for variable in ("KERNEL_DIR", "CK_DIR", "CK_ROOT"):
        assert f"\n{variable} ?= " in flags
        assert f"'-I$({variable})'" in flags
    assert "'--rocm-path=$(ROCM_PATH)'" in flags


def test_headers_below_the_folder_are_found_by_a_pattern(generated: Path, tmp_path: Path) -> None:
    (generated / "ck_tile" / "core.hpp").rename(generated / "core.h")
    (generated / "deep" / "er").mkdir(parents=True)
    (generated / "deep" / "er" / "a-b.hpp").write_text("")
    wrap_headers(generated, tmp_path / "out", "made", ProjectFormat.NINJA, arch=ARCH, pattern="deep/**/*.hpp")
    assert '#include "deep/er/a-b.hpp"' in (tmp_path / "out" / "kernels" / "deep_er_a_b.cpp").read_text()


def test_what_cannot_be_wrapped_is_refused_before_anything_is_written(generated: Path, tmp_path: Path) -> None:
    def refused(says: str, error: type[Exception] = UsageError, folder: Path = generated, **options: str) -> None:
        with pytest.raises(error, match=says):
            wrap_headers(folder, tmp_path / "out", "made", ProjectFormat.NINJA, arch=ARCH, **options)
        assert not (tmp_path / "out").exists()

    refused("is not a folder", folder=tmp_path / "none")
    refused("matches \\*.cuh", pattern="*.cuh")
    refused("--pattern ''", pattern="")
    refused("--pattern '/etc/\\*'", pattern="/etc/*")
    (generated / "something_else-v2.hpp").write_text("")
    refused("both become the C identifier something_else_v2")
    (generated / "something_else-v2.hpp").write_text(GEMM)
    (generated / "something-else.v2.hpp").unlink()
    refused("both are of a kernel called gemm_fp16_rcr_compv3")
    (generated / "something_else-v2.hpp").unlink()
    (generated / "gone.hpp").symlink_to("nowhere")
    refused("gone.hpp: No such file", BuildError)
    (generated / "gone.hpp").unlink()
    (generated / "folder.hpp").mkdir()
    refused("folder.hpp: Is a directory", BuildError)
    (generated / "folder.hpp").rmdir()
    (generated / 'quo"te.hpp').write_text("")
    refused("no #include can name it")


def test_the_command_line_wraps(generated: Path, tmp_path: Path) -> None:
    wrap = ["export", "wrap", "--kernel-dir", generated]
    done = command.catalog(*wrap, "--out", tmp_path / "out", "--pattern", "some*.hpp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"1 kernel in {tmp_path / 'out'}: ")
    assert "cmake -S" in done.stdout
    assert (tmp_path / "out" / "CMakeLists.txt").is_file()
    wrong = command.catalog(*wrap, "--out", generated)
    assert wrong.returncode == 2
    assert "is not empty" in wrong.stderr
    assert "Traceback" not in wrong.stderr
