"""The translation unit of an AMD row: upstream's own source or an instance of its templates, and our entry points."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from catalog.build.describe import c_string
from catalog.errors import BuildError
from catalog.ops.attention.kernels.ck.rows import source_of_row
from catalog.ops.attention.kernels.dialect import uses
from catalog.ops.attention.traits import Bias, Mask, Qscale
from catalog.ops.attention.upstream.sources import ck_facts
from catalog.schema.kernel import Kernel

# The launchers of a generated source are specialisations of a template over the row's traits.
_LAUNCHER = re.compile(
    r"template\s*<>\s*(?:float|void)\s+(?P<function>fmha_\w+_<(?P<traits>[^;{}()]*)>)\s*"
    r"\(\s*const\s+ck_tile::stream_config\s*&\s*\w*\s*,\s*(?P<args>fmha_\w+_args)\s*\w*\s*\)"
)

# Newer backward kernels say by functions of the same traits what their workspace is.
_SIZE_OF_WORKSPACE = "fmha_bwd_dq_dk_dv_dq_ws_host_size_"
_WORKSPACE = """
struct Workspace {{
    static std::size_t host_bytes(ck_tile::index_t batch) {{
        return fmha_bwd_dq_dk_dv_dq_ws_host_size_<{traits}>(batch);
    }}
    template <class... Sizes>
    static std::size_t device_bytes(Sizes... sizes) {{
        return fmha_bwd_dq_dk_dv_dq_ws_device_upper_bound_<{traits}>(sizes...);
    }}
    template <class... Sizes>
    static void prepare(void* to, Sizes... sizes) {{
        fmha_bwd_dq_dk_dv_dq_prepare_ws_host_<{traits}>(to, sizes...);
    }}
    static bool starts_from_zeros() {{ return fmha_bwd_dq_dk_dv_needs_zero_dq_acc_<{traits}>(); }}
}};
"""


@dataclass(frozen=True)
class _Source:
    """A source that can launch a kernel: its text, the C++ types of CK's arguments and workspace, and the launcher."""

    text: str
    args: str
    launcher: str
    workspace: str = "using Workspace = catalog::ck::NoWorkspace;"


def emit_generated(kernel: Kernel, generated: str) -> str:
    """The C++ source of ``kernel``, of which ``generated`` is what upstream's generator wrote.

    Raises:
        BuildError: ``generated`` defines no launcher that the shim knows.
    """
    launcher = _LAUNCHER.search(generated)
    if launcher is None:
        raise BuildError(
            f"kernel {kernel.name}: the generated source defines no launcher that takes a stream and arguments",
            hint="The CK checkout is of a revision that this version does not know.",
        )
    source = _Source(generated, launcher["args"], launcher["function"])
    if _SIZE_OF_WORKSPACE in generated:
        source = replace(source, workspace=_WORKSPACE.format(traits=launcher["traits"]).strip())
    return _with_entry_points(kernel, source)


def emit_row(kernel: Kernel, revision: str) -> str:
    """The C++ source of ``kernel`` from its own traits, for CK's headers of ``revision``.

    Raises:
        BuildError: the headers do not implement the kernel; the message names the trait.
    """
    return _with_entry_points(kernel, _Source(source_of_row(kernel, revision), "Instance::Args", "Instance::run"))


def _with_entry_points(kernel: Kernel, source: _Source) -> str:
    signature, algorithm = kernel.signature, kernel.algorithm
    traits = (
        signature.bias is Bias.ALIBI,
        signature.mask is not Mask.NO,
        signature.qscale is not Qscale.NO,
        signature.deterministic,
    )
    flags = ", ".join(str(flag).lower() for flag in traits)
    element_bytes = {"fp32": 4, "fp16": 2, "bf16": 2}.get(signature.dtype.value, 1)
    before = ck_facts().families[kernel.family].before
    return f"""\
#include "hip/older_hip.hpp"
{source.text}
#include "ck/launch.hpp"

namespace {{
{source.workspace}
constexpr catalog::ck::Traits row{{{flags}, {algorithm.tile_n0}, {{{uses(kernel)}}}}};
}}  // namespace

extern "C" {{
__attribute__((visibility("default"))) const char* catalog_describe(void) {{ return {c_string(kernel)}; }}

__attribute__((visibility("default"))) int32_t catalog_workspace_size(const catalog_args* args,
                                                                      catalog_workspace* size) {{
    return catalog::ck::workspace_size<Workspace>(args, row, size);
}}

__attribute__((visibility("default"))) int32_t catalog_launch(const catalog_args* args, void* stream) {{
    using Args = {source.args};
    return catalog::ck::launch<Args, catalog::ck::Before::{before}, Workspace>(
        args, stream, row, {element_bytes}, [](const ck_tile::stream_config& config, const Args& ck_args) {{
            {source.launcher}(config, ck_args);
        }});
}}
}}
"""
