"""Timings of host kernels that do not depend on what else runs: those of the CPU time of the thread that launches.

This folder is on the PYTHONPATH of programs that tests start, whose kernels have one thread. Python imports this module
when it starts.
"""

from __future__ import annotations

import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any


class _OfHost(MetaPathFinder):
    """Changes the host's device when it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "catalog.runtime.devices.host.device":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            vars(module).update(time=SimpleNamespace(perf_counter_ns=time.thread_time_ns), _waits=dict)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _OfHost())
