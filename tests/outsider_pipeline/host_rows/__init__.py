"""Attention on the host CPU, one query at a time: a pipeline for the few queries of a decoding step."""

from dataclasses import replace
from pathlib import Path

from catalog.ops.protocol import Extension

HERE = Path(__file__).parent


class HostRows(Extension):
    """The pipeline ``host_rows``."""

    about = "attention on the host, one query at a time"
    specs = HERE / "specs"
    headers = {"rows": HERE / "include"}

    def emit(self, kernel, backend, memory):
        """The traits of a row as a C++ struct, as for the built-in kernels, and a header of this package."""
        from catalog.ops.attention.kernels.host.emit import HOST  # with the first kernel that is built

        return replace(HOST, folder="rows").source(kernel, "rows")


EXTENSION = HostRows()
