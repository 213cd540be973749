"""DLPack capsules: arrays of other libraries in any memory, used without a copy.

The layout is that of ``dlpack.h``, both the unversioned one and version 1, which also says whether an array may be
written.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime.elements import numpy_dtype

CPU = 1
"""DLPack's device type of CPU memory."""

_FLOATS: Mapping[tuple[int, int], str] = MappingProxyType(
    {
        (2, 16): "float16",
        (2, 32): "float32",
        (2, 64): "float64",
        (4, 16): "bfloat16",
        (10, 8): "float8_e4m3fn",
        (11, 8): "float8_e4m3fnuz",
        (12, 8): "float8_e5m2",
        (13, 8): "float8_e5m2fnuz",
    }
)
"""Dtype names, of NumPy or ml_dtypes, by DLPack's (code, bits)."""

_WORDS = {(code, bits): f"{kind}{bits}" for code, kind in enumerate(("int", "uint")) for bits in (8, 16, 32, 64)}
_ELEMENTS: Mapping[tuple[int, int], str] = MappingProxyType({**_FLOATS, **_WORDS, (6, 8): "bool"})
ELEMENT_NAMES = frozenset(_ELEMENTS.values())
"""Dtype names, of NumPy or ml_dtypes, that an array may have."""


@cache
def dtype_of_torch(dtype: Any) -> np.dtype[Any] | None:
    """The NumPy or ml_dtypes dtype for a PyTorch dtype; None if no kernel accepts it."""
    name = str(dtype).removeprefix("torch.")
    return numpy_dtype(name) if name in ELEMENT_NAMES else None


_READ_ONLY = 1
_NEWEST = 1
_valid = ctypes.PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = ctypes.PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),  # in elements; NULL: dense
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", _Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p))


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True, slots=True)
class Shared:
    """The array in a capsule: ``strides`` are in bytes, ``owner`` keeps the memory alive.

    ``writable`` is None if the capsule does not say.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    writable: bool | None
    owner: Any = field(repr=False)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, which sees foreign element types as bytes: view them as :attr:`dtype`."""
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.dtype.itemsize}",
            "data": (self.address, not self.writable),
            "version": 3,
        }


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array in C order."""
    return tuple(accumulate((itemsize, *reversed(shape[1:])), mul))[: len(shape)][::-1]


def shared(name: str, capsule: object) -> Shared:
    """Take the array out of a capsule, which can then not be used again; ``name`` is the tensor it was given as.

    Raises:
        TensorError: it is not a DLPack capsule, was already used, has a newer version, or has elements that no kernel
            accepts.
    """
    managed = _taken(name, capsule)
    tensor = managed.tensor
    dtype = _ELEMENTS.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TensorError(
            f"{name} has elements that no kernel accepts: DLPack's type {tensor.code} of {tensor.bits} bits, "
            f"{tensor.lanes} lanes"
        )
    shape, itemsize = tuple(tensor.shape[: tensor.ndim]), tensor.bits // 8
    strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    return Shared(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides or dense_strides(shape, itemsize),
        numpy_dtype(dtype),
        not managed.flags & _READ_ONLY if isinstance(managed, _Versioned) else None,
        managed,
    )


def _taken(name: str, capsule: object) -> _Managed | _Versioned:
    """Take ownership of a capsule's struct; its deleter is called with the last reference."""
    for kind, new in ((_Versioned, b"dltensor_versioned"), (_Managed, b"dltensor")):
        if _valid(capsule, new):
            managed: _Managed | _Versioned = kind.from_address(_pointer(capsule, new))
            _rename(capsule, _USED[new])
            weakref.finalize(managed, _delete, ctypes.addressof(managed), managed.deleter)
            if isinstance(managed, _Versioned) and managed.major > _NEWEST:
                raise TensorError(f"{name}: DLPack {managed.major}.{managed.minor} is newer than version {_NEWEST}")
            return managed
    raise TensorError(f"{name}: __dlpack__ returned no DLPack capsule, or a used one: {capsule!r}")


_USED = {new: b"used_" + new for new in (b"dltensor", b"dltensor_versioned")}
"""Names of used capsules; a capsule does not copy its name, so these must stay alive."""


def _delete(address: int, deleter: int | None) -> None:
    if deleter:
        ctypes.CFUNCTYPE(None, c_void_p)(deleter)(address)
