"""Attention kernels for the host CPU: C++ headers, specialised for each row."""
