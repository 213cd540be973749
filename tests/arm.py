"""Arm on other CPUs: a device whose libraries run under an emulator."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from catalog.ops import DEFAULT, operation
from catalog.runtime.devices.host.calls import HostCall
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.devices.loading import LoadedKernel
from catalog.runtime.tensors import Array
from catalog.schema.problem import Problem
from catalog.schema.workspace import NO_WORKSPACE, Workspace

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).with_name("arm_driver.cpp")

_LINE = 64
_SECONDS = 300

Span = tuple[int, int]
"""Memory of this process: its first address, and the one after its last."""


def build_driver(folder: Path) -> Path:
    """The program that calls libraries on the emulated CPU."""
    driver = folder / DRIVER.stem
    subprocess.run([COMPILER, "-std=c++17", "-O1", DRIVER, "-o", driver, "-ldl"], check=True)
    return driver


class ArmDevice(HostDevice):
    """The CPU that the emulator calls ``cpu``, with two threads.

    Each call of a library is a process, which gets copies of the call's memory; what it leaves in them is copied back.
    """

    def __init__(self, driver: Path, cpu: str) -> None:
        super().__init__(num_threads=2)
        self._image = driver.with_name(f"{cpu}.image")
        self._emulated = [EMULATOR, "-cpu", cpu, "-L", LIBRARIES, str(driver)]
        self._memory: dict[int, list[Span]] = {}

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        described = subprocess.run([*self._emulated, path], check=True, stdout=subprocess.PIPE, timeout=_SECONDS)
        row = json.loads(described.stdout)
        arguments = operation(row.get("operation", DEFAULT)).arguments
        pointers = tuple(arguments.offsets.values())

        def launch(args: Any, _: int | None) -> int:
            memory = self._memory[ctypes.addressof(args._obj)]
            return self._call([path, "catalog_launch"], args._obj, None, memory, pointers)

        def size(args: Any, needed: Any) -> int:
            return self._call([path, "catalog_workspace_size"], args._obj, needed._obj, [], ())

        return LoadedKernel(row["id"], path, row["arch"], arguments, launch, size)

    def call(self, problem: Problem, tensors: Mapping[str, Array], workspace: Workspace = NO_WORKSPACE) -> HostCall:
        call = super().call(problem, tensors, workspace)
        call.args.pool = None  # it is in this process
        lists = [values.buffer_info() for one in call.lists for values in one.arrays.values()]
        spans = [_span_of_array(array) for array in call.kept]
        self._memory[ctypes.addressof(call.args)] = _merged([*spans, *((at, at + 4 * count) for at, count in lists)])
        return call

    def _call(
        self, function: list[Path | str], args: Any, other: Any, memory: list[Span], pointers: Iterable[int]
    ) -> int:
        """Call a function of a library with two structs, of which the first has ``pointers`` to ``memory``."""
        used = [at for at in pointers if ctypes.c_uint64.from_buffer(args, at).value]
        spans = [_span_of(one) for one in (args, other) if one is not None] + memory
        header = struct.Struct(f"={3 + len(used)}Q")
        places, size = list[int](), header.size
        for start, end in spans:
            places.append(-(-size // _LINE) * _LINE + start % _LINE)
            size = places[-1] + end - start

        image = bytearray(size)
        own = places[0]
        header.pack_into(image, 0, own, 0 if other is None else places[1], len(used), *(own + at for at in used))
        for place, (start, end) in zip(places, spans, strict=True):
            image[place : place + end - start] = ctypes.string_at(start, end - start)
        for at in used:
            address = ctypes.c_uint64.from_buffer(args, at).value
            there = zip(places, spans, strict=True)
            [moved] = [place + address - start for place, (start, end) in there if start <= address < end]
            struct.pack_into("=Q", image, own + at, moved)

        self._image.write_bytes(image)
        done = subprocess.run([*self._emulated, *function, self._image], check=False, timeout=_SECONDS)
        left = self._image.read_bytes()
        for place, (start, end) in list(zip(places, spans, strict=True))[1:]:
            ctypes.memmove(start, left[place : place + end - start], end - start)
        return done.returncode


def _span_of(arguments: Any) -> Span:
    start = ctypes.addressof(arguments)
    return start, start + ctypes.sizeof(arguments)


def _span_of_array(array: Array) -> Span:
    """At least one element: an empty array has an address, too."""
    reach = [stride * max(extent - 1, 0) for extent, stride in zip(array.shape, array.strides, strict=True)]
    start = array.ctypes.data + sum(step for step in reach if step < 0)
    return start, start + sum(map(abs, reach)) + array.itemsize


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same memory, no part of it twice."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
