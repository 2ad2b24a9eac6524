"""Kernels that draw tokens, and that draft and check them."""
