"""CK's include folder, in the checkout that the user names or in ROCm."""

from __future__ import annotations

import functools
from pathlib import Path

from catalog.build.generators import find_folders
from catalog.build.hip.toolchain import rocm_root
from catalog.errors import BuildError
from catalog.settings import settings


def ck_include(part: str) -> Path:
    """The include folder that holds the folder ``part``, such as ``ck_tile/ops/gemm``.

    It is in the checkout of the settings, in a package that contains one, or in a ROCm installation.

    Raises:
        BuildError: there is none, or there are several.
    """
    chosen = settings().ck_root
    return _find(rocm_root() if chosen is None else chosen, part, named=chosen is not None)


@functools.cache
def _find(root: Path, part: str, *, named: bool) -> Path:
    found = find_folders(root, "include", lambda folder: (folder / part).is_dir())
    if len(found) == 1:
        return found[0]
    if found:
        raise BuildError(
            f"{root} holds several folders {part}",
            hint="CATALOG_CK_ROOT or --ck-root names one checkout: "
            + ", ".join(str(folder.parent) for folder in found),
        )
    if named:
        raise BuildError(f"{root} holds no folder include/{part}", hint="Is it a CK checkout, and complete?")
    raise BuildError(
        "kernels of AMD archs come from a CK checkout, and none is named",
        hint="CATALOG_CK_ROOT or --ck-root names one: a clone of composable_kernel, or what carries it inside, such as "
        "the source distribution of flash-attn.",
    )
