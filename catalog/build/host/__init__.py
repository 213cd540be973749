"""Kernels for the host CPU: C++ headers, specialised per row by the translation unit that :mod:`.emit` writes."""
