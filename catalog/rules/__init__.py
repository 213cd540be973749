"""Which kernels exist, and why: enumeration as a join, constraints with reasons, receipts, parity."""
