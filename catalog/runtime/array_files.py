"""Files of recorded inputs, in the format of ``numpy.savez``; everything in them is checked before it is used."""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.files import Sync, open_given, published

_SUFFIX = ".npy"
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>|=]?[A-Za-z][0-9]{0,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>[0-9, ]{0,200})\), \} *\n",
    re.DOTALL,
)
"""The header that NumPy writes (version 1.0, numpy.lib.format). Others are rejected: NumPy would evaluate them."""

_READ_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, MemoryError, OverflowError)
"""Exceptions that zipfile and NumPy raise for malformed files, besides OSError and ValueError."""


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` to ``path`` atomically, as unsigned integers of the same bits: .npy has no bfloat16 and no fp8.

    Raises:
        OSError: the file cannot be written.
    """
    bits: dict[str, Any] = {name: array.view(f"u{array.dtype.itemsize}") for name, array in arrays.items()}
    with published(path, Sync.NONE) as file:  # traces are checked when they are read
        np.savez(file, **bits)


def load_arrays(path: Path, most_bytes: int) -> dict[str, NDArray[Any]]:
    """Read the arrays that :func:`save_arrays` wrote, as unsigned integers; allocates at most the file's size.

    Raises:
        ValueError: the file is malformed; the text says how.
        OSError: the file cannot be read, is not a regular file, or has more than ``most_bytes`` bytes.
    """
    with open_given(path, most_bytes) as file:
        left = os.fstat(file.fileno()).st_size
        arrays = {}
        try:
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    left -= member.file_size
                    # Members are stored uncompressed and together no longer than the file: no decompression bomb.
                    if member.compress_type != zipfile.ZIP_STORED or left < 0 or member.filename[-4:] != _SUFFIX:
                        raise ValueError(f"{member.filename[:100]!r} is not a member that a trace writes")
                    arrays[member.filename[:-4]] = _array(archive.read(member))
        except _READ_ERRORS as error:
            raise ValueError(str(error) or type(error).__name__) from None
        return arrays


def _array(content: bytes) -> NDArray[Any]:
    """Parse a .npy file; its header is compared with its size before anything is allocated."""
    header = _HEADER.match(content)
    if header is None:
        raise ValueError("an array has a header that traces do not write")
    dtype = np.dtype(header["dtype"].decode())
    if dtype.kind != "u":
        raise ValueError("object arrays are not allowed" if dtype.hasobject else f"an array of {dtype}, not of bits")
    shape = tuple(int(extent) for extent in header["shape"].split(b",") if extent.strip())
    if math.prod(shape) * dtype.itemsize != len(content) - header.end():
        raise ValueError("an array's shape does not match its content")
    flat = np.frombuffer(content, dtype, offset=header.end()).copy()  # writable for the caller
    return flat.reshape(shape, order="F" if header["fortran"] == b"True" else "C")
