"""Kernels as sources for somebody else's build: rows of the catalog, or a folder of generated headers."""

from catalog.build.export.rows import export_project, export_register
from catalog.build.export.wrap import wrap_headers

__all__ = ["export_project", "export_register", "wrap_headers"]
