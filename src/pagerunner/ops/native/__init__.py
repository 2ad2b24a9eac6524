"""Kernels for CPUs, in C. They are compiled when they are first needed; without a compiler torch's own operators serve."""
