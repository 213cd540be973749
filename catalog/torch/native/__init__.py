"""Calls of kernels on PyTorch tensors without Python: a module in C++, compiled once for each PyTorch and Python.

A call in Python costs as much as a small kernel takes. The module repeats calls that were checked, and starts the
kernels of their gradients from autograd's own threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import sysconfig
import tempfile
import threading
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from catalog.build import processes
from catalog.build.permissions import make_private, require_private
from catalog.build.toolchains import digest_of, find_host_compiler
from catalog.errors import BuildError, CacheError
from catalog.runtime import tracing
from catalog.runtime.devices import known_call
from catalog.settings import settings

NAME = "catalog_calls"
_SOURCE = Path(__file__).with_name("calls.cpp")
_LIBRARIES = ("c10", "torch_cpu", "torch_python")
_TIMEOUT_SECONDS = 600.0
"""PyTorch's headers take about half a minute, and 1 GB of memory."""

_log = logging.getLogger(__name__)


def compile_calls() -> Path:
    """Compile the module into the cache folder, if it is not there, and use it from now on; its path.

    This takes about half a minute, once for each version of PyTorch and of Python. Later processes find the module when
    they import :mod:`catalog.torch`. Results are the same with and without it.

    Raises:
        ToolchainError: there is no C++ compiler.
        BuildError: the module does not compile; ``log`` is the compiler's output.
        CacheError: others have access to the cache folder.
    """
    place = _place()
    make_private(place)
    require_private(settings().cache_dir)
    if _intact(place) is None:
        compiler = find_host_compiler(settings().cxx, os.environ.get("PATH", os.defpath))
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            built = Path(temporary) / NAME
            done = processes.run(_command(compiler.command, built), built.parent, _TIMEOUT_SECONDS, threading.Event())
            if done.failure is not None:
                raise BuildError(
                    f"{_SOURCE.name} does not compile with {compiler.path}: {done.failure}",
                    hint="Calls work without it; they take more time in Python.",
                    log=done.output,
                )
            built.replace(place / f"{digest_of(str(built))}.so")
    load.cache_clear()
    load()
    return _intact(place) or place


@cache
def load() -> Any:
    """The module, which calls use from now on; None if it was not compiled for this PyTorch, or does not load."""
    try:
        path = _intact(_place())
        if path is None:
            return None
        require_private(settings().cache_dir)
        loader = ExtensionFileLoader(NAME, str(path))
        spec = spec_from_loader(NAME, loader)
        assert spec is not None, "there is a loader"  # noqa: S101
        module = module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, CacheError) as error:
        _log.warning("compiled calls are not used: %s", error)
        return None
    tracing.when_switched(lambda active: module.set_enabled(not active))
    known_call.use(module)
    return module


def _intact(place: Path) -> Path | None:
    """The module in a folder, whose name is its digest: a file that was cut short could end the process."""
    return next((path for path in sorted(place.glob("*.so")) if path.stem == digest_of(str(path))), None)


def _place() -> Path:
    """The folder of the module for this PyTorch and Python."""
    of = (_SOURCE.read_bytes(), torch.__version__.encode(), str(sys.implementation.cache_tag).encode())
    return folder() / hashlib.sha256(b"\0".join(of)).hexdigest()


def folder() -> Path:
    """Where modules of all versions are."""
    return settings().cache_dir / "torch"


def _command(compiler: list[str], target: Path) -> list[str]:
    of_torch = Path(torch.__file__).parent
    headers = (of_torch / "include", sysconfig.get_paths()["include"])
    return [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in headers),
        str(_SOURCE),
        *("-o", str(target)),
        f"-L{of_torch / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]
