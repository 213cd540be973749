"""Files of kept inputs, as ``numpy.savez`` writes them; whatever they state is checked before it is used."""

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
"""How NumPy writes the header of version 1.0 (numpy.lib.format); it would evaluate any other, so no other is read."""

_READ_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, MemoryError, OverflowError)
"""What zipfile and NumPy raise for files that are badly made, besides OSError and ValueError."""


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the bits of ``arrays`` to ``path``, whole or not at all: .npy has no bfloat16 and no fp8.

    Raises:
        OSError: the file cannot be written.
    """
    bits: dict[str, Any] = {name: array.view(f"u{array.dtype.itemsize}") for name, array in arrays.items()}
    with published(path, Sync.NONE) as file:  # a trace is checked when it is read
        np.savez(file, **bits)


def load_arrays(path: Path, most_bytes: int) -> dict[str, NDArray[Any]]:
    """The arrays of :func:`save_arrays`, as unsigned integers; no more is allocated than the file has bytes.

    Raises:
        ValueError: it is not such a file; the text says in which way.
        OSError: it cannot be read, is no regular file, or has more than ``most_bytes``.
    """
    with open_given(path, most_bytes) as file:
        left = os.fstat(file.fileno()).st_size
        arrays = {}
        try:
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    left -= member.file_size
                    # Members that are stored as they are, and are no longer than the file together: no bomb.
                    if member.compress_type != zipfile.ZIP_STORED or left < 0 or member.filename[-4:] != _SUFFIX:
                        raise ValueError(f"{member.filename[:100]!r} is not what a trace keeps")
                    arrays[member.filename[:-4]] = _array(archive.read(member))
        except _READ_ERRORS as error:
            raise ValueError(str(error) or type(error).__name__) from None
        return arrays


def _array(content: bytes) -> NDArray[Any]:
    """The array of a .npy file; its header is compared with its size before anything is allocated."""
    header = _HEADER.match(content)
    if header is None:
        raise ValueError("an array's header is not one that a trace writes")
    dtype = np.dtype(header["dtype"].decode())
    if dtype.kind != "u":
        raise ValueError("object arrays are not kept" if dtype.hasobject else f"an array of {dtype}, not of bits")
    shape = tuple(int(extent) for extent in header["shape"].split(b",") if extent.strip())
    if math.prod(shape) * dtype.itemsize != len(content) - header.end():
        raise ValueError("an array's shape is not that of its content")
    flat = np.frombuffer(content, dtype, offset=header.end()).copy()  # the caller may write into it
    return flat.reshape(shape, order="F" if header["fortran"] == b"True" else "C")
