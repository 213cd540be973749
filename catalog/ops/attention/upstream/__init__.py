"""CK's own generator of attention kernels, in the user's checkout."""
